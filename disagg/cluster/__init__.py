"""Places groups of ranks, starts them with Ray, supervises them, announces them to routers, and stops them."""
