"""The report of a demo run: a table of its requests, and a timeline."""
