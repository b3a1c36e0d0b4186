"""Computations over the batches of all workers of torch.distributed's default group, or in one process.

Letters in shapes: b a worker's share of the batch, B the whole batch, d width.
"""

import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vit_model.objectives.losses import in_full
from vit_model.parts import empty_linear


class BatchNorm(nn.Module):
    """Batch normalisation of [b, d] by mean and variance over all workers' batches.

    torch's SyncBatchNorm does this on GPUs only. There are no running averages, because the projector and predictor are
    discarded after pretraining.
    """

    def __init__(self, width: int, affine: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width)) if affine else None
        self.bias = nn.Parameter(torch.zeros(width)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        """[b, d] -> [b, d], in the dtype of x, computed in float32."""
        numbers = in_full(x)
        centred = numbers - mean_over_workers(numbers.mean(dim=0))
        variance = mean_over_workers(centred.square().mean(dim=0))
        out = centred * (variance + 1e-5).rsqrt()
        if self.weight is not None and self.bias is not None:
            out = out * self.weight + self.bias
        return out.to(x.dtype)


def projector(widths: tuple[int, ...], generator: torch.Generator) -> nn.Sequential:
    """Build linear layers without bias, each followed by BatchNorm, and by ReLU except the last.

    The last BatchNorm has no weights (SimCLR's design, without its gamma).
    """
    layers: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(itertools.pairwise(widths), start=1):
        linear = empty_linear(inputs, outputs, bias=False)
        nn.init.kaiming_uniform_(linear.weight, a=math.sqrt(5), generator=generator)
        last = number == len(widths) - 1
        layers += [linear, BatchNorm(outputs, affine=not last)]
        layers += [] if last else [nn.ReLU()]
    return nn.Sequential(*layers)


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def gather(keys: Tensor) -> Tensor:
    """Concatenate each worker's [b, d] to [B, d] in the order of their ranks, without a gradient."""
    if world() == 1:
        return keys
    parts = [torch.empty_like(keys) for _ in range(world())]
    dist.all_gather(parts, keys.contiguous())
    return torch.cat(parts)


def mean_over_workers(values: Tensor) -> Tensor:
    """Return the mean of a tensor over all workers; gradients flow back to each worker's values."""
    if world() == 1:
        return values
    mean: Tensor = _Mean.apply(values)  # type: ignore[no-untyped-call]
    return mean


class _Mean(torch.autograd.Function):
    """The mean over workers. Its backward pass is the same mean: each value is 1 / world of every worker's mean."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total / world()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total / world()
