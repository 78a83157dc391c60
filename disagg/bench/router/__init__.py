"""`disagg bench router`: CPU time of one router process for each request and each streamed token."""
