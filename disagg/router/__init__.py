"""The router: chooses a prefill and a decode group for each request, and runs the request's sessions on them."""
