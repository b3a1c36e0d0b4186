"""Running a pipeline: `plan` computes keys, `driver` runs missing stages, `runs` and `logs` show what happened.

A cached rerun takes a fraction of a second. Imports inside functions are what it does not need: psutil, the local Ray,
the Hugging Face hub.
"""
