"""The verbs of the command line, a module for each family; `pipelines.cli` puts them together."""
