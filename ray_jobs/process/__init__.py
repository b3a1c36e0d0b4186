"""What every stage's process does: its entry point, its context, its signs of life, its devices, its progress lines.

A stage's process checks its --spec and reports a user error at once: it imports ray when that is done, and it never
imports torch, because it submits the work and computes nothing. Only `devices` imports torch.
"""
