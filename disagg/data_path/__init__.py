"""The data path for KV pools of other engines: senders and receivers without leaders, schedulers and models."""
