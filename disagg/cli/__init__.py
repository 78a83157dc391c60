"""The command line: parses flags. `disagg.commands`, `disagg.bench` and other packages do the work."""
