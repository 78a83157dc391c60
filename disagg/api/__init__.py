"""The HTTP API: OpenAI's shapes in, `Router.generate` inside, tokens out. `app.py` lists the routes."""
