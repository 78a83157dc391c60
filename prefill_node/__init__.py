"""The prefill node: computes prompts and sends their KV cache to decode ranks."""
