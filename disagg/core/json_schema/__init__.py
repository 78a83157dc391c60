"""JSON schemas: what values a schema excludes, and `oneOf` in terms of `anyOf`."""
