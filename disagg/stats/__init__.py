"""`disagg stats`: the use of a server's memory, as tables and, over time, as a chart."""
