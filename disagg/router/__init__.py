"""The router: choice of a pair of groups, and one session per request."""
