"""Parsers of answers: separate reasoning, content and tool calls in the text of a model family."""
