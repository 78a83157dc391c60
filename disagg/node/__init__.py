"""Code common to all kinds of rank: leader, transfer thread, device queues, step plans."""
