"""Deployment scripts: the local demo and the Ray job runner."""
