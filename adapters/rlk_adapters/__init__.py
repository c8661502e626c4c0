"""Engines: each file turns one engine's tensors into a capture."""
