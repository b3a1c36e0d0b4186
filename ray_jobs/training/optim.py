"""The optimizer of pretraining and fine-tuning: AdamW, its decay mask, the learning-rate schedule, DeepSpeed's dict.

In: a model and the fields of a stage's configuration. Out: a `torch.optim.AdamW`, a float per step, a dict for
`deepspeed.initialize`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from pipelines.spec import Optimizer, Pretrain
from ray_jobs.training.task import DivergenceError
from vit_model.errors import UserError

BUCKET = 1 << 24
"""Values that DeepSpeed reduces and gathers at a time, for which it has a buffer (its default is 5e8), and that stage 3
keeps gathered (1e9, which is all weights of nearly every ViT)."""


def learning_rate(step: int, total_steps: int, base: float, optimizer: Optimizer) -> float:
    """Return the learning rate of update number `step`, counted from 0: linear warm-up times a decay to 0 at the end.

    base * min(1, step / warmup) * decay(progress), counted as in the authors' code: the first warm-up step has rate 0,
    and `total_steps` itself, at which the decay would reach 0, is never run.
    """
    if not 0 <= step <= total_steps:
        raise ValueError(f"step {step} is not from 0 to total_steps {total_steps}")
    warmup = round(optimizer.warmup_fraction * total_steps)
    rising = min(1.0, step / warmup) if warmup else 1.0
    progress = max(0, step - warmup) / max(1, total_steps - warmup)
    falling = 0.5 * (1.0 + math.cos(math.pi * progress)) if optimizer.schedule == "cosine" else 1.0 - progress
    return base * rising * falling


def is_decayed(name: str, parameter: torch.Tensor) -> bool:
    """Return whether weight decay applies: to kernels only, not to biases, norms, tokens or position embeddings."""
    return parameter.ndim >= 2 and name.rpartition(".")[2] == "weight"


def adamw(model: torch.nn.Module, optimizer: Optimizer, decays_all: bool = False) -> torch.optim.AdamW:
    """Return AdamW with two groups, with and without decay. Set the learning rate before a step (`set_learning_rate`).

    Decay is decoupled and multiplied by the scheduled learning rate: p -= rate * weight_decay * p, as in torch, timm
    and the paper's code (flax's former Adam). big_vision multiplies it by the schedule alone, which rises to 1 and not
    to the base rate, so its `wd` is `weight_decay` times the base rate (docs/training.md). Only kernels are decayed
    (big_vision's mask), or every trained parameter if `decays_all`.
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
    """Set the learning rate of an optimizer's next step (torch's, or DeepSpeed's wrapper of one)."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def check_finite(name: str, value: float | torch.Tensor | None, step: int) -> None:
    """Raise DivergenceError unless `value` is a finite number >= 0. DeepSpeed gives -1 for a norm that is not finite.

    None passes: DeepSpeed did not compute a norm, and the loss is checked as well.
    """
    if value is not None and not 0.0 <= float(value) < math.inf:
        raise DivergenceError(
            f"{name} is {float(value)} at step {step}: lower learning_rate, or use a longer warm-up"
        )


def micro_batch_share(config: Pretrain, world: int) -> int:
    """Return the images of one micro-batch on one of `world` workers.

    Raises:
        UserError: the workers cannot share a micro-batch evenly.
    """
    images = config.micro_batch_size
    if world < 1 or images % world:
        divisors = [n for n in range(1, images + 1) if images % n == 0]
        steps = config.gradient_accumulation_steps
        what = f"batch_size {config.batch_size}"
        what += f" / gradient_accumulation_steps {steps} = {images}" if steps > 1 else ""
        raise UserError(
            f"{what} is not a multiple of the {world} workers;"
            f" use one of {', '.join(map(str, divisors))} workers"
        )
    return images // world


def deepspeed_config(config: Pretrain, world: int) -> dict[str, Any]:
    """Return DeepSpeed's settings for a pretraining on `world` workers.

    The optimizer is passed to DeepSpeed as an object (`adamw`), so that it is the same with and without DeepSpeed.

    Raises:
        UserError: the workers cannot share a micro-batch evenly.
    """
    is_bfloat16, steps = config.dtype == "bfloat16", config.gradient_accumulation_steps
    settings: dict[str, Any] = {
        "train_batch_size": config.batch_size,
        "train_micro_batch_size_per_gpu": micro_batch_share(config, world),
        "gradient_accumulation_steps": steps,
        "gradient_clipping": config.optimizer.clip_norm,
        "zero_optimization": {
            "stage": config.zero_stage,
            # Copying gradients into one buffer saves a GPU's memory from fragments, and costs a CPU 5% of a step.
            "contiguous_gradients": torch.cuda.is_available() or config.zero_stage > 1,
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_max_live_parameters": BUCKET,
            "stage3_max_reuse_distance": BUCKET,
        },
        # DeepSpeed knows AdamW and few others; tests/support/zero_matrix.py proves those that we use.
        "zero_allow_untested_optimizer": True,
        # A gradient that is not finite ends the run (`check_finite`); DeepSpeed would silently skip the step.
        "bf16": {"enabled": is_bfloat16, "check_grad_overflow": False},
        "wall_clock_breakdown": False,
        "steps_per_print": None,
    }
    if is_bfloat16 and steps > 1:  # sums of bfloat16 numbers would lose the small ones
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings
