"""Copy kernels between a paged KV pool and contiguous staging memory. One file per kernel."""
