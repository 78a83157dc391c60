"""`disagg bench kernels` and `swap`: each kernel beside its ceiling."""
