"""`disagg bench serve`: load against an OpenAI-compatible endpoint, each answer timed and checked. Needs no GPU."""
