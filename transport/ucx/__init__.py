"""The data plane over UCX."""
