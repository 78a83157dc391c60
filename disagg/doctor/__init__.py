"""`disagg doctor`: checks this machine, and reports a remedy for each problem."""
