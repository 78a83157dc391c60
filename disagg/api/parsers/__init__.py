"""Parsers that divide the text of an answer into reasoning, content and tool calls, by the model family's syntax."""
