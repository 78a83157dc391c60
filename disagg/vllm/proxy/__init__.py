"""A proxy in front of two kinds of vLLM servers: one computes prompts, the other generates tokens."""
