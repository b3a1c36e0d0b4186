"""LoRA (Hu et al. 2022, arXiv 2106.09685): low-rank changes of a ViT's attention matrices, learned beside them.

In: a `ViT` and `LoRAOptions`. Out: the same ViT with two more matrices per block and target, or an ordinary ViT with
these merged into its weights.
Use: `add(model, options, seed)`; train what `is_adapter` names; `merge(model)`.
"""

import math
from typing import cast

import torch
from torch import Tensor, nn

from vit_model.blocks import Attention
from vit_model.config import LoRAOptions, LoRATarget
from vit_model.model import ViT


class LowRank(nn.Module):
    """scale * B A dropout(x), which is added to a projection of `width` values to `width` values.

    `down` is A [rank, width], `up` is B [width, rank].
    """

    def __init__(self, width: int, options: LoRAOptions) -> None:
        super().__init__()
        self.scale = options.scale
        self.dropout = nn.Dropout(options.dropout)
        self.down = nn.Linear(width, options.rank, bias=False)
        self.up = nn.Linear(options.rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[b, n, d] -> [b, n, d]."""
        change: Tensor = self.up(self.down(self.dropout(x))) * self.scale
        return change

    def change(self) -> Tensor:
        """Return what it adds to the weights [d, d] of the projection, computed in float64."""
        return self.scale * (self.up.weight.double() @ self.down.weight.double())


@torch.no_grad()
def add(model: ViT, options: LoRAOptions, seed: int) -> None:
    """Add the matrices to every block. The model computes the same as before, because B is zero.

    A is uniform within 1 / sqrt(width), torch's and peft's Kaiming initialisation with a = sqrt(5). It is drawn on the
    CPU in float32, so a seed gives the same weights on every device.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    bound = 1 / math.sqrt(model.config.width)
    for attention in attentions(model):
        weight = attention.qkv.weight
        with torch.device("meta"):  # torch's own initialisation would advance the global generator
            added = nn.ModuleDict({target: LowRank(model.config.width, options) for target in options.targets})
        attention.lora = added.to_empty(device=weight.device).to(weight.dtype).train(model.training)
        for pair in pairs(attention).values():
            drawn = torch.empty(pair.down.weight.shape, device="cpu")
            pair.down.weight.copy_(drawn.uniform_(-bound, bound, generator=generator))
            pair.up.weight.zero_()


@torch.no_grad()
def merge(model: ViT) -> None:
    """Add every matrix product B A to its projection's weights, and remove the matrices.

    The model computes the same as before, up to rounding.
    """
    for attention in attentions(model):
        for target, pair in pairs(attention).items():
            weight = target_weight(attention, target)
            weight.copy_(weight.double() + pair.change())
        attention.lora = None


def pairs(attention: Attention) -> dict[LoRATarget, LowRank]:
    """Return the low-rank changes of an attention's projections, by target; empty without LoRA."""
    return {} if attention.lora is None else cast(dict[LoRATarget, LowRank], dict(attention.lora.items()))


def target_weight(attention: Attention, target: LoRATarget) -> Tensor:
    """Return the weights [d, d] of a projection of attention; `qkv` stacks the query, key and value matrices."""
    if target == "proj":
        return attention.proj.weight
    return attention.qkv.weight.chunk(3)[("query", "key", "value").index(target)]


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name is one of the matrices."""
    return ".attn.lora." in name


def attentions(model: ViT) -> list[Attention]:
    """Return the attention of every block, in order."""
    return [module for module in model.blocks.modules() if isinstance(module, Attention)]
