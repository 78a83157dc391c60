"""The transfer benchmark's requests, moved by NIXL."""
