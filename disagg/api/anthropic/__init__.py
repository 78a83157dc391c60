"""Anthropic's `/v1/messages`, translated to and from chat requests."""
