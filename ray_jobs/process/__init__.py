"""What every stage's process does: its entry point, its context, its devices, its progress lines."""
