"""The HTTP API in the formats of OpenAI and Anthropic, on top of `Router.run`. `app.py` lists the routes."""
