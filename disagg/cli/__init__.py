"""The command line: parses flags; `disagg.commands` and others do the work."""
