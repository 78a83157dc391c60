"""The HTTP API in OpenAI's shapes, on top of `Router.generate`. `app.py` lists the routes."""
