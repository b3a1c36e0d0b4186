"""SQL over a store's results, in DuckDB: the tables, their columns, and queries that can only read them."""
