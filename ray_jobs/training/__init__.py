"""Training: the loop, its objectives and optimizers. `fit`, `loop`, `objective` and `optim` import torch at the top."""
