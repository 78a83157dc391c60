"""Kernels that move head slices between paged pools and contiguous staging, one file each."""
