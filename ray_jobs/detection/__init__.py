"""Detection of objects: what its results are worth."""
