"""A Hugging Face model with paged attention, tensor parallelism and a sampler."""
