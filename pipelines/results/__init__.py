"""Reading a store: queries, reports, lineage, listings, checks of its files, and the notebook's `Library`."""
