"""Training: the loop, its objectives, optimizers and devices. torch is imported at the top of these modules."""
