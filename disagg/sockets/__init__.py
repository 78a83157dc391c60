"""The listening sockets of this user's processes: their addresses, purposes and protection."""
