"""Readers: one module for each kind of source (a recipe's `source.kind`)."""
