"""The process of every stage: its entry point, context, heartbeat, devices and progress lines.

A stage's process checks its --spec and reports a user error at once, before it imports ray. It never imports torch,
because it only submits the work. Only `devices` imports torch.
"""
