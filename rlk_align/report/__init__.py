"""A comparison as a person reads it on a terminal, as JSON, and as a table of tokens."""
