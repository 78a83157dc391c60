"""What prefill and decode ranks share: the transfer thread, device queues, step plans."""
