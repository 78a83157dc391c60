"""Choice of a (prefill, decode) pair and the life of one request."""
