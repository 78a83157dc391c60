"""`disagg bench serve`: load on an OpenAI-compatible endpoint, with each answer timed and checked. Needs no
GPU."""
