"""Copies between paged KV pools and staging memory, with checksums."""
