"""Bounded readers of model files. Nothing in a file is trusted: every length is checked before it is used."""
