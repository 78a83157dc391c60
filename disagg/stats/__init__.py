"""`disagg stats`: what a server's memory is used for, now as tables and over time as a chart."""
