"""The commands, one module per group; `pipelines.cli` imports the module of the command that is used.

An import inside a function is one that other commands of the module do not need: torch, the local Ray, `doctor`.
"""
