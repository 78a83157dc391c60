"""Profiles of running ranks: options, and the summary of a recorded trace. `python -m disagg.core.profile`."""
