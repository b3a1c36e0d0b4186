"""The optimizer of pretraining and fine-tuning: AdamW, its decay mask, the rate of each step, DeepSpeed's dict.

In: a model and the fields of a stage's configuration. Out: a `torch.optim.AdamW`, a float for each step, a dict for
`deepspeed.initialize`.
"""

from __future__ import annotations

import copy
import math
from typing import Any, TypeVar

import torch

from pipelines.spec import Optimizer
from vit_model.errors import UserError

# Numbers that DeepSpeed reduces and gathers at a time; it allocates a buffer of this size (its default is 5e8).
_BUCKET = 1 << 24
Module = TypeVar("Module", bound=torch.nn.Module)


def learning_rate(step: int, total_steps: int, base: float, optimizer: Optimizer) -> float:
    """The learning rate of update number `step`, counted from 0: linear warm-up times a decay to 0 at the end.

    base * min(1, step / warmup) * decay(progress), as the authors' code counts: the first update under warm-up has
    rate 0, and `total_steps` itself, where the decay would be 0, is never run.
    """
    if not 0 <= step <= total_steps:
        raise ValueError(f"step {step} is not from 0 to total_steps {total_steps}")
    warmup = round(optimizer.warmup_fraction * total_steps)
    rising = min(1.0, step / warmup) if warmup else 1.0
    progress = max(0, step - warmup) / max(1, total_steps - warmup)
    falling = 0.5 * (1.0 + math.cos(math.pi * progress)) if optimizer.schedule == "cosine" else 1.0 - progress
    return base * rising * falling


def is_decayed(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay applies: to kernels only, not to biases, norms, tokens or position embeddings."""
    return parameter.ndim >= 2 and name.rpartition(".")[2] == "weight"


def adamw(model: torch.nn.Module, optimizer: Optimizer, decays_all: bool = False) -> torch.optim.AdamW:
    """AdamW in two groups, decayed and not; whoever steps it sets the learning rate first (`set_learning_rate`).

    Decay is decoupled and multiplied by the scheduled learning rate: p -= rate * weight_decay * p, as in torch, timm
    and the paper's code (flax's former Adam). big_vision multiplies it by the schedule alone, which rises to 1, not
    to the base rate: its `wd` is `weight_decay` times the base rate (docs/training.md). Kernels are decayed
    (big_vision's mask), or with `decays_all` every trained parameter.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for name, p in named if is_decayed(name, p)], "weight_decay": optimizer.weight_decay},
        {"params": [p for name, p in named if not is_decayed(name, p)], "weight_decay": 0.0},
    ]
    if decays_all:
        groups = [{"params": [p for _, p in named], "weight_decay": optimizer.weight_decay}]
    return torch.optim.AdamW(groups, lr=0.0, betas=optimizer.betas, eps=1e-8, fused=True)


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Let the next step of an optimizer (torch's or DeepSpeed's wrapper of one) use this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def working_copy(model: Module, dtype: torch.dtype) -> Module:
    """The model that computes gradients: a copy in `dtype`, or the float32 model itself."""
    return model if dtype == torch.float32 else copy.deepcopy(model).to(dtype)


def update(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, working: torch.nn.Module, clip_norm: float
) -> torch.Tensor:
    """One step of `model`'s float32 weights by the gradients of `working`, which gets them back rounded.

    Returns the norm of the gradients before they were clipped. Without the float32 weights small steps would round
    to nothing in bfloat16.
    """
    weights, copies = list(model.parameters()), list(working.parameters())
    if working is not model:
        for weight, rounded in zip(weights, copies, strict=True):
            assert rounded.grad is not None
            weight.grad, rounded.grad = rounded.grad.float(), None
    norm = torch.nn.utils.clip_grad_norm_(weights, clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    if working is not model:
        with torch.no_grad():
            for weight, rounded in zip(weights, copies, strict=True):
                rounded.copy_(weight)
    return norm


class DivergenceError(UserError):
    """A training whose loss or gradient has stopped being finite."""


def check_finite(what: str, value: float | torch.Tensor | None, step: int) -> None:
    """Raise DivergenceError unless `value` is a finite number >= 0. DeepSpeed says -1 for a norm that is not finite.

    None, where DeepSpeed has computed no norm, passes: the loss is checked as well.
    """
    if value is not None and not 0.0 <= float(value) < math.inf:
        raise DivergenceError(
            f"{what} is {float(value)} at step {step}: a lower learning_rate, or a longer warm-up, would help"
        )


def deepspeed_config(
    *, batch_size: int, world: int, zero_stage: int, dtype: str, optimizer: Optimizer
) -> dict[str, Any]:
    """DeepSpeed's configuration of a run whose global batch has `batch_size` images on `world` workers.

    The optimizer itself is handed over as an object (`adamw`), so that it is the same one without DeepSpeed.

    Raises:
        ValueError: the workers cannot share a batch evenly.
    """
    if world < 1 or batch_size % world:
        fitting = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
        raise UserError(
            f"batch_size {batch_size} is not a multiple of the {world} workers;"
            f" it can be shared by {', '.join(map(str, fitting))}"
        )
    return {
        "train_batch_size": batch_size,
        "train_micro_batch_size_per_gpu": batch_size // world,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optimizer.clip_norm,
        "zero_optimization": {
            "stage": zero_stage,
            "reduce_bucket_size": _BUCKET,
            "allgather_bucket_size": _BUCKET,
        },
        # A gradient that is not finite ends the run (`check_finite`); DeepSpeed would skip the step in silence.
        "bf16": {"enabled": dtype == "bfloat16", "check_grad_overflow": False},
        "wall_clock_breakdown": False,
        "steps_per_print": None,
    }
