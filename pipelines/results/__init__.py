"""Reading a store: queries, accuracies, lineage, listings, checks of its files, and the notebook's `Library`.

Imports inside functions are heavy (duckdb, numpy, torch, ray_jobs), and most commands do not need them.
"""
