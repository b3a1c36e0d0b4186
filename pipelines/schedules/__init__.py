"""Recurring runs: their records (`schedule`), and the process that starts what is due (`serve`)."""
