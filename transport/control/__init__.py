"""The control plane: typed messages between named peers, exactly once and in order."""
