"""Two captures, or two plain files, held against each other: identity first, then numbers."""
