"""Checks the model types of transformers: compares a tiny model of each with `generate()`."""
