"""Recurring runs: their records (`schedule`), the process that starts what is due (`serve`), its units (`render`)."""
