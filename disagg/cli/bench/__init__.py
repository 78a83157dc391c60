"""The flags of `disagg bench`."""
