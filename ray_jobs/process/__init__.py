"""What every stage's process does: its entry point, its context, its signs of life, its devices, its progress lines.

Only `devices` imports torch, and deepspeed when it is used, because a stage's own process submits the work and computes
nothing.
"""
