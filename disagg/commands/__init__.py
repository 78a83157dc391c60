"""The commands that start a cluster: `demo`, `generate`, `serve`, `launch`, `scale`."""
