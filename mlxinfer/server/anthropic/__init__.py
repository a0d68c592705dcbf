"""Anthropic's API: messages, counting their tokens, and the list of models."""
