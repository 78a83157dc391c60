"""The decode node: receives the KV cache of prompts from prefill ranks and generates tokens."""
