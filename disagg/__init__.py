"""Disaggregated LLM serving: prefill on one group of ranks, move the KV cache, decode on another."""

__version__ = "0.1.0"
