"""What every stage's process does: its entry point, its context, its signs of life, its devices, its progress lines.

The functions of this room import torch, ray and deepspeed where they use them. A stage's process can then check its
--spec and report a user error at once; only the processes that compute wait for these imports.
"""
