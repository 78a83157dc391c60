"""OpenAI's `/v1/responses`, translated to and from chat requests. Nothing is stored between requests."""
