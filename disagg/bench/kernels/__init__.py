"""`disagg bench kernels` and `disagg bench swap`: the speed of each kernel and its ceiling, from the same run."""
