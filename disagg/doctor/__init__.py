"""`disagg doctor`: probes of this machine, each with a remedy."""
