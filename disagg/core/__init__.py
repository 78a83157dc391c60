"""Types, configuration, errors and ports. Imports nothing else of ours."""
