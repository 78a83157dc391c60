"""`disagg bench serve`: sends load to an OpenAI-compatible endpoint; times and checks each answer. Needs no GPU."""
