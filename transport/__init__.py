"""Moving bytes (UCX, in-process) and moving control messages (ZMQ)."""
