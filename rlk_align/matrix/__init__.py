"""The TP x CP validation matrix: the same seeded rows on every topology and layout, bit for bit."""
