"""The listening sockets of this user's processes: where they listen, what for, and what keeps strangers out."""
