"""Data plane (UCX, TLS, in-process) and control plane (ZMQ, in-process) between ranks."""
