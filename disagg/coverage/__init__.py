"""Which model types of transformers are served exactly: a tiny model of each, compared with `generate()`."""
