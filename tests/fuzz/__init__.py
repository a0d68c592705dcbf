"""Requests that nobody should send: good ones with something wrong in them, sent to a real server."""
