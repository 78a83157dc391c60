"""`disagg bench storage`: bandwidth of writing and reading pages, as a share of plain I/O of the same bytes."""
