"""Checks which model types of transformers are supported: compares a tiny model of each type with `generate()`."""
