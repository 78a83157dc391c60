"""`disagg top`: shows a server's current requests, groups and transfers in a terminal."""
