"""Ollama's API: chat, generate, embed, and what is known of the models."""
