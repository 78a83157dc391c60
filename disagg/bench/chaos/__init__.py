"""Faults under load: kills and stops ranks of a running system, and compares every answer with a run without faults.

The run without faults is called the *quiet run*. The system has its *full strength* while it has at least as many
serving groups of each role as before the first fault."""
