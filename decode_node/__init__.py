"""The node that receives KV and generates tokens."""
