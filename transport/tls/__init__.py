"""The data plane over TLS 1.3."""
