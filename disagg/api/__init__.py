"""The HTTP API in OpenAI's request and response format, on top of `Router.run`. `app.py` lists the routes."""
