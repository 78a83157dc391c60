"""`disagg bench storage`: pages written to a storage and read back, as a share of plain I/O of the same bytes."""
