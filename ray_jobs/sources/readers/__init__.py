"""A reader per kind of source: what a recipe's `source.kind` names."""
