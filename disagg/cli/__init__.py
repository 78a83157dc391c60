"""The command line: parses flags. The work is done by `disagg.commands`, `disagg.bench` and other packages."""
