"""Functions that return matplotlib figures, each saved as PNG beside its numbers as CSV."""
