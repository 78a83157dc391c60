"""`disagg bench handoff`: the cost of a hand-over with a real model on real ranks."""
