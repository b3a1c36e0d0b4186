"""The memory that a forward pass keeps for the backward pass."""

from collections.abc import Callable

import torch
from torch import Tensor


def kept_bytes(model: torch.nn.Module, run: Callable[[], object]) -> int:
    """What autograd keeps while `run` computes, each storage once, without the model's own."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    del out
    return sum(t.untyped_storage().nbytes() for address, t in storages.items() if address not in own)
