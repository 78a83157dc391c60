"""`disagg stats`: shows how a server's memory is used, now in tables, or over time in a chart."""
