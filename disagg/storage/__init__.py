"""Storage of KV pages outside of a group's memory: the third tier, behind the KV pool and pinned host memory."""
