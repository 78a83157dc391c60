"""`disagg stats`: shows a server's memory by kind, as tables of the current use or as a chart over time."""
