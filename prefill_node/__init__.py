"""The node that computes prompts and sends their KV."""
