"""What every stage's process does: its entry point, its context, its progress lines."""
