"""What a model's configuration says about its layers, heads and KV cache."""
