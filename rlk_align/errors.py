"""The one error of ours that a caller can mend: unusable input."""


class UnusableInput(ValueError):
    """Input that cannot be compared as it is; the message says what to do. Exit status 2."""
