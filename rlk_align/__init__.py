"""Captures, drift and verdicts: do a rollout engine and a trainer agree, token by token."""
