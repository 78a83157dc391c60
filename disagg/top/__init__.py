"""`disagg top`: shows a server's current work in a terminal."""
