"""Moves the transfer benchmark's requests with NIXL, for a comparison with this project's transfer."""
