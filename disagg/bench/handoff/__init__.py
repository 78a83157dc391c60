"""`disagg bench handoff`: the cost of handing a request from prefill to decode, with a real model on real ranks."""
