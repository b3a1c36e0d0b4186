"""Training: the loop, its objectives and optimizers.

`contract` and `task` need no torch, because the process that only submits a fine-tuning imports them; the other modules
import torch at the top. DeepSpeed is imported inside functions, after `devices.import_deepspeed` has prepared it.
"""
