"""The optimizer of pretraining and fine-tuning: its groups of weights, the learning-rate schedule, DeepSpeed's dict.

In: a model and the fields of a stage's configuration. Out: one of torch's optimizers, a float per step, a dict for
`deepspeed.initialize`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.spec import Finetune, Optimizer, Pretrain
from ray_jobs.training.task import DivergenceError
from vit_model import lora
from vit_model.build import Network
from vit_model.errors import UserError
from vit_model.model import ViT
from vit_model.weights import HEADS

BUCKET = 1 << 24
"""Values that DeepSpeed reduces and gathers at a time, for which it has a buffer (its default is 5e8), and that stage 3
keeps gathered (1e9, which is all weights of nearly every ViT)."""


def learning_rate(step: int, total_steps: int, base: float, optimizer: Optimizer) -> float:
    """Return the learning rate of update number `step`, counted from 0: linear warm-up times the schedule.

    base * min(1, step / warmup) * schedule, counted as in the authors' code: the first warm-up step has rate 0, and
    `total_steps` itself, at which a decay or cooldown would reach 0, is never run. rsqrt and the cooldown are
    big_vision's (utils.py; Zhai et al. 2022, section 3.5).
    """
    if not 0 <= step <= total_steps:
        raise ValueError(f"step {step} is not from 0 to total_steps {total_steps}")
    warmup, cooldown = optimizer.warmup(total_steps), round(optimizer.cooldown_fraction * total_steps)
    rising = min(1.0, step / warmup) if warmup else 1.0
    since = max(0, step - warmup)
    progress = since / max(1, total_steps - warmup)
    falling = {
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "linear": 1.0 - progress,
        "constant": 1.0,
        "rsqrt": 1.0 / math.sqrt(1.0 + since / optimizer.timescale),
    }[optimizer.schedule]
    ending = min(1.0, (total_steps - step) / cooldown) if cooldown else 1.0
    return base * rising * falling * ending


def is_decayed(name: str, parameter: torch.Tensor) -> bool:
    """Return whether weight decay applies: to kernels only, not to biases, norms, tokens or position embeddings."""
    return parameter.ndim >= 2 and name.rpartition(".")[2] == "weight"


def is_block_matrix(name: str, parameter: torch.Tensor, prefix: str = "") -> bool:
    """Return whether a parameter is a matrix product's in a block of the ViT, which Muon steps."""
    return parameter.ndim == 2 and bool(re.fullmatch(re.escape(prefix) + r"blocks\.\d+\..*\.weight", name))


def layers_above(name: str, depth: int, prefix: str = "") -> int:
    """Return how many layers of a ViT with `depth` blocks come after that of a parameter, as BEiT and MAE count them.

    The embeddings are layer 0, the blocks 1 to depth, and the final norm and the head the last one, depth + 1. So is
    what an objective adds, whose names do not begin with the ViT's `prefix`.
    """
    if not name.startswith(prefix):
        return 0
    name = name.removeprefix(prefix)
    if block := re.match(r"blocks\.(\d+)\.", name):
        return depth - int(block[1])
    # patches, the norm before the blocks, and what is a parameter of the model itself: tokens, positions
    return depth + 1 if re.fullmatch(r"(patch_embed|norm_pre)\..*|\w+", name) else 0


def num_blocks(model: torch.nn.Module, prefix: str = "") -> int:
    """Return the number of a ViT's blocks; 0 for a ResNet. The names of its weights begin with `prefix`."""
    names = (name.removeprefix(prefix) for name, _ in model.named_parameters() if name.startswith(prefix))
    return len({block[1] for name in names if (block := re.match(r"blocks\.(\d+)\.", name))})


def make_optimizer(
    model: torch.nn.Module,
    optimizer: Optimizer,
    base: float,
    decays_all: bool = False,
    head_first: int = 0,
    prefix: str = "",
) -> torch.optim.Optimizer:
    """Return AdamW, SGD with momentum, or Muon. Set the learning rate before a step (`set_learning_rate`).

    AdamW's decay is decoupled and multiplied by the scheduled learning rate: p -= rate * weight_decay * p, as in torch,
    timm and the paper's code (flax's former Adam). big_vision multiplies it by the schedule alone, which rises to 1 and
    not to the base rate: decay "times_schedule". Only kernels are decayed (big_vision's mask), or every trained
    parameter if `decays_all`. SGD adds weight_decay * p to the gradient, as torch's does. Muon steps the matrices of a
    ViT's blocks and decays them as AdamW would; AdamW steps all other weights.

    Args:
        base: the learning rate that the schedule multiplies.
        head_first: steps in which only the head's learning rate is not 0.
        prefix: what the names of a ViT's weights begin with in a module that wraps it.
    """
    _skip_dynamo()
    depth = num_blocks(model, prefix)
    groups: dict[tuple[bool, int, bool, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            above = layers_above(name, depth, prefix) if optimizer.layer_decay < 1 else 0
            is_spared = not (decays_all or is_decayed(name, parameter))
            waits = head_first > 0 and not name.startswith(HEADS)
            is_muons = optimizer.name == "muon" and is_block_matrix(name, parameter, prefix)
            groups.setdefault((is_muons, above, is_spared, waits), []).append(parameter)
    settings: list[dict[str, Any]] = []
    matrices: list[dict[str, Any]] = []
    for is_muons, above, is_spared, waits in sorted(groups):
        scale = optimizer.layer_decay**above
        decay = 0.0 if is_spared else optimizer.weight_decay
        if optimizer.decay == "times_schedule":
            decay /= base * scale
        (matrices if is_muons else settings).append(
            {
                "params": groups[is_muons, above, is_spared, waits],
                "weight_decay": decay,
                "scale": scale,
                "first_step": head_first if waits else 0,
                "ema": optimizer.ema,
            }
        )
    if optimizer.name == "muon":
        return MuonAndAdamW(matrices, settings, optimizer.momentum, optimizer.betas)
    if optimizer.name == "sgd":
        return torch.optim.SGD(settings, lr=0.0, momentum=optimizer.momentum, fused=True)
    return torch.optim.AdamW(settings, lr=0.0, betas=optimizer.betas, eps=1e-8, fused=True)


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon and AdamW as one optimizer, with the groups and the states of both.

    Muon (Jordan et al. 2024) has Nesterov momentum and five Newton-Schulz iterations in bfloat16 of each matrix as it
    is stored; queries, keys and values are one. The update is multiplied by 0.2 * sqrt(max(rows, columns)), so that it
    is as large as AdamW's and the same learning rates serve (Liu et al. 2025, arXiv 2502.16982, section 2.2).

    Args:
        matrices: groups for Muon.
        others: groups for AdamW.
    """

    def __init__(
        self,
        matrices: list[dict[str, Any]],
        others: list[dict[str, Any]],
        momentum: float,
        betas: tuple[float, float],
    ) -> None:
        self.muon = torch.optim.Muon(matrices, lr=0.0, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(others, lr=0.0, betas=betas, eps=1e-8, fused=True)
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})
        self.muon.state = self.adamw.state = self.state
        self.found_inf = torch.zeros(())

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all weights, or none if `found_inf` is 1."""
        # Torch's Muon has no such switch on the device, so this waits for it.
        if not self.found_inf:
            step(self.muon)
            step(self.adamw)

    def part(self, weight: torch.Tensor) -> torch.optim.Optimizer:
        """Return the one of both that steps a weight."""
        is_muons = any(weight is each for group in self.muon.param_groups for each in group["params"])
        return self.muon if is_muons else self.adamw


def step(optimizer: torch.optim.Optimizer) -> None:
    """Make a step without torch's wrappers of it, which import torch._dynamo; `make_optimizer` made the optimizer."""
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)


def _skip_dynamo() -> None:
    """Keep torch's optimizers from importing torch._dynamo, which takes 3 s and which only compiled training needs.

    Some of their methods import it when they are first called, to exclude themselves from compilation, and keep the
    excluded function in this attribute of the original (torch/_compile.py).
    """
    for method in vars(torch.optim.Optimizer).values():
        if (original := getattr(method, "__wrapped__", None)) is not None:
            setattr(original, "__dynamo_disable", original)


def freeze(model: torch.nn.Module, what: Literal["backbone", "all_but_biases", "all_but_lora"] | int) -> None:
    """Exclude weights from training: all but the head's, or those of the embeddings and the first `what` blocks.

    "all_but_biases" also trains every bias, as BitFit (Ben Zaken et al. 2022) and VPT's bias-only rows (KMnP/vpt,
    src/models/vit_models.py, tinytl-bias); "all_but_lora" the matrices of `vit_model.lora`.
    """
    depth = num_blocks(model)
    for name, parameter in model.named_parameters():
        if isinstance(what, int):
            is_trained = depth + 1 - layers_above(name, depth) > what
        else:
            is_trained = (
                name.startswith(HEADS)
                or (what == "all_but_biases" and name.endswith(".bias"))
                or (what == "all_but_lora" and lora.is_adapter(name))
            )
        parameter.requires_grad_(is_trained)


def restrict(model: Network, config: Finetune, seed: int = 0) -> None:
    """Exclude from training what a fine-tuning does not train. With `lora`, first add its matrices to the model."""
    if config.lora is not None:
        assert isinstance(model, ViT), "checked against the backbone"
        lora.add(model, config.lora, seed)
        freeze(model, "all_but_lora")
    elif config.freeze is not None:
        freeze(model, config.freeze)


def set_learning_rate(optimizer: Any, rate: float, step: int = 0) -> None:
    """Set the learning rate of an optimizer's step number `step` (torch's, or DeepSpeed's wrapper of one)."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("scale", 1.0) if step >= group.get("first_step", 0) else 0.0


def is_finite(value: float) -> bool:
    """Return whether a loss or a norm is finite. DeepSpeed gives -1 for a norm that is not."""
    return 0.0 <= value < math.inf


def check_finite(name: str, value: float | torch.Tensor, step: int) -> None:
    """Raise DivergenceError unless a loss is finite."""
    if not is_finite(float(value)):
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


def micro_batches(
    count: int, views: tuple[torch.Tensor, ...], targets: torch.Tensor, positions: NDArray[np.int64]
) -> Iterator[tuple[tuple[torch.Tensor, ...], torch.Tensor, NDArray[np.int64]]]:
    """Split a worker's share of a batch, its views, targets and positions, into `count` equal parts."""
    parts = zip(*(view.chunk(count) for view in views), strict=True)
    return zip(parts, targets.chunk(count), np.split(positions, count), strict=True)


def deepspeed_config(config: Pretrain, world: int) -> dict[str, Any]:
    """Return DeepSpeed's settings for a pretraining on `world` workers.

    DeepSpeed gets the optimizer as an object (`make_optimizer`), so that it is the same with and without DeepSpeed.

    Raises:
        UserError: the workers cannot share a micro-batch evenly.
    """
    is_bfloat16, steps = config.dtype == "bfloat16", config.gradient_accumulation_steps
    settings: dict[str, Any] = {
        "train_batch_size": config.batch_size,
        "train_micro_batch_size_per_gpu": micro_batch_share(config, world),
        "gradient_accumulation_steps": steps,
        "gradient_clipping": config.optimizer.clip_norm or 0.0,  # 0 is none
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
        # An update with a gradient that is not finite is skipped, as always in float32; `Guard` then ends the run.
        "bf16": {"enabled": is_bfloat16, "check_grad_overflow": True},
        "wall_clock_breakdown": False,
        "steps_per_print": None,
    }
    if is_bfloat16 and steps > 1:  # sums of bfloat16 numbers would lose the small ones
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings
