"""The optimizer of pretraining and fine-tuning: its groups of weights, the learning-rate schedule, DeepSpeed's dict.

In: a model and the fields of a stage's configuration. Out: one of torch's optimizers, a float per step, a dict for
`deepspeed.initialize`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.spec import Finetune, Optimizer, Pretrain
from ray_jobs.training.task import DivergenceError
from ray_jobs.training.workers import micro_batch_share
from vit_model import lora
from vit_model.model import ViT
from vit_model.parts import ParameterGroups

BUCKET = 1 << 24
"""The number of values that DeepSpeed reduces and gathers at a time, in a buffer (its default is 5e8), and that stage 3
keeps gathered (its default is 1e9, which is all weights of nearly every ViT)."""


def warmup_steps(optimizer: Optimizer, steps: int) -> int:
    """Return the number of warm-up steps of a training with `steps` steps."""
    configured = optimizer.warmup_steps
    return round(optimizer.warmup_fraction * steps) if configured is None else configured


def learning_rate(step: int, total_steps: int, base: float, optimizer: Optimizer) -> float:
    """Return the learning rate of update number `step`, counted from 0: linear warm-up times the schedule.

    base * min(1, step / warmup) * schedule, counted as in the authors' code: the first warm-up step has rate 0, and
    step `total_steps`, at which a decay or cooldown would reach 0, is never run. rsqrt and the cooldown are as in
    big_vision (utils.py; Zhai et al. 2022, section 3.5).
    """
    warmup, cooldown = warmup_steps(optimizer, total_steps), round(optimizer.cooldown_fraction * total_steps)
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


class Rule(NamedTuple):
    """One of torch's optimizers."""

    make: Callable[[list[dict[str, Any]], Optimizer], torch.optim.Optimizer]
    """(groups of weights, settings) -> the optimizer; its learning rate is set before each step"""
    averages: tuple[str, ...]
    """the averages that it keeps for a weight, each float32 and of the weight's shape"""


ADAMW = Rule(
    lambda groups, settings: torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=1e-8, fused=True),
    ("exp_avg", "exp_avg_sq"),
)
SGD = Rule(
    lambda groups, settings: torch.optim.SGD(groups, lr=0.0, momentum=settings.momentum, fused=True),
    ("momentum_buffer",),
)
MUON = Rule(
    lambda groups, settings: torch.optim.Muon(
        groups, lr=0.0, momentum=settings.momentum, adjust_lr_fn="match_rms_adamw"
    ),
    ("momentum_buffer",),
)
OPTIMIZERS: dict[str, tuple[Rule, Rule]] = {"adamw": (ADAMW, ADAMW), "sgd": (SGD, SGD), "muon": (MUON, ADAMW)}
"""{`Optimizer.name`: (the rule for the matrices of a ViT's blocks, the rule for all other weights)}"""
_RULES: dict[type, Rule] = {torch.optim.AdamW: ADAMW, torch.optim.SGD: SGD, torch.optim.Muon: MUON}


def average_kinds(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> tuple[str, ...]:
    """Return the names of the averages that an optimizer keeps for a weight; they have the weight's shape."""
    if isinstance(optimizer, MuonAndAdamW):
        optimizer = optimizer.part(weight)
    if isinstance(optimizer, torch.optim.SGD) and not optimizer.defaults["momentum"]:
        return ()
    return _RULES[type(optimizer)].averages


def make_optimizer(
    module: ParameterGroups, optimizer: Optimizer, base: float, head_first: int = 0
) -> torch.optim.Optimizer:
    """Return AdamW, SGD with momentum, or Muon. Set the learning rate before a step (`set_learning_rate`).

    AdamW's decay is decoupled and multiplied by the scheduled learning rate: p -= rate * weight_decay * p, as in torch,
    timm and the paper's code (flax's former Adam). big_vision multiplies it by the schedule alone, which rises to 1 and
    not to the base rate: decay "times_schedule". The module says which parameters are decayed (`ParameterGroups`). SGD
    adds weight_decay * p to the gradient, as torch does. Muon steps the matrices of a ViT's blocks and decays them as
    AdamW would; AdamW steps all other weights. With `base_width`, rates and decays are muP's (Yang et al. 2022, Table
    3): the initial weights and the scores of attention follow it by themselves if the heads are as wide as in the tuned
    model, because the classifier starts at 0.

    Args:
        base: the learning rate that the schedule multiplies.
        head_first: the number of steps during which the learning rate is 0 for all weights but the head.
    """
    _skip_dynamo()
    for_matrices, for_others = OPTIMIZERS[optimizer.name]
    groups: dict[tuple[bool, int, bool, int, float], list[torch.nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            is_apart = for_matrices != for_others and module.is_block_matrix(name)
            above = module.last_layer - module.layer_of(name) if optimizer.layer_decay < 1 else 0
            first = module.first_step(name) if module.is_head(name) else max(head_first, module.first_step(name))
            narrower = 1.0
            if optimizer.base_width is not None and (width := module.width_of(name)) is not None:
                narrower = optimizer.base_width / width
            groups.setdefault((is_apart, above, not module.is_decayed(name), first, narrower), []).append(parameter)
    settings: list[dict[str, Any]] = []
    matrices: list[dict[str, Any]] = []
    for is_apart, above, is_spared, first, narrower in sorted(groups):
        scale = optimizer.layer_decay**above
        decay = 0.0 if is_spared else optimizer.weight_decay / narrower  # the rate multiplies it by that
        if optimizer.decay == "times_schedule":
            decay /= base * scale
        (matrices if is_apart else settings).append(
            {
                "params": groups[is_apart, above, is_spared, first, narrower],
                "weight_decay": decay,
                "scale": scale * narrower,
                "first_step": first,
                "ema": optimizer.ema,
            }
        )
    if for_matrices == for_others:
        return for_others.make(settings, optimizer)
    return MuonAndAdamW(for_matrices.make(matrices, optimizer), for_others.make(settings, optimizer))


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon and AdamW as one optimizer, with the groups and the states of both.

    Muon (Jordan et al. 2024) applies Nesterov momentum and five Newton-Schulz iterations in bfloat16 to each matrix as
    it is stored; queries, keys and values share one. The update is multiplied by 0.2 * sqrt(max(rows, columns)), so it
    is as large as AdamW's and takes the same learning rates (Liu et al. 2025, arXiv 2502.16982, section 2.2).
    """

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer) -> None:
        self.muon, self.adamw = muon, adamw
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
        """Return the optimizer that steps a weight."""
        is_muon = any(weight is other for group in self.muon.param_groups for other in group["params"])
        return self.muon if is_muon else self.adamw


def step(optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer of `make_optimizer` without torch's wrappers, which import torch._dynamo."""
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)


def _skip_dynamo() -> None:
    """Keep torch's optimizers from importing torch._dynamo, which takes 3 s and which only compiled training needs.

    Some of their methods import it on their first call, to exclude themselves from compilation, and keep the excluded
    function in this attribute of the original (torch/_compile.py).
    """
    for method in vars(torch.optim.Optimizer).values():
        if (original := getattr(method, "__wrapped__", None)) is not None:
            setattr(original, "__dynamo_disable", original)


def freeze(model: ParameterGroups, what: Literal["backbone", "all_but_biases", "all_but_lora"] | int) -> None:
    """Exclude weights from training: all but the head, or the embeddings and the first `what` blocks.

    "all_but_biases" also trains every bias, as in BitFit (Ben Zaken et al. 2022) and VPT's bias-only rows (KMnP/vpt,
    src/models/vit_models.py, tinytl-bias); "all_but_lora" also trains the matrices of `vit_model.lora`.
    """
    for name, parameter in model.named_parameters():
        if isinstance(what, int):
            is_trained = model.layer_of(name) > what
        else:
            is_trained = (
                model.is_head(name)
                or (what == "all_but_biases" and name.endswith(".bias"))
                or (what == "all_but_lora" and lora.is_adapter(name))
            )
        parameter.requires_grad_(is_trained)


def restrict(model: ParameterGroups, config: Finetune, seed: int = 0) -> None:
    """Exclude from training what a fine-tuning keeps as it is. With `lora`, first add its matrices to the model."""
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


def is_finite_norm(value: float) -> bool:
    """Return whether a norm is finite. DeepSpeed returns -1 for a norm that is not."""
    return 0.0 <= value < math.inf


def check_finite(loss: float, step: int) -> None:
    """Raise DivergenceError unless a loss is finite; it may be negative."""
    if not math.isfinite(loss):
        raise DivergenceError(f"loss is {loss} at step {step}: lower learning_rate, or use a longer warm-up")


class MicroBatch(NamedTuple):
    """A worker's share of a batch, or of a part of it."""

    views: tuple[torch.Tensor, ...]
    """one or more batches of images from `TrainTransform`, uint8 [n, h, w, c]"""
    targets: torch.Tensor
    """labels [n], or probabilities [n, classes]"""
    positions: NDArray[np.int64]
    """[n], the numbers of the samples over the whole training, from which an image's random numbers are drawn"""


def micro_batches(count: int, batch: MicroBatch) -> Iterator[MicroBatch]:
    """Split a worker's share of a batch into `count` equal parts."""
    parts = zip(*(view.chunk(count) for view in batch.views), strict=True)
    return map(MicroBatch, parts, batch.targets.chunk(count), np.split(batch.positions, count))


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
        # DeepSpeed lists few optimizers besides AdamW as tested; tests/support/zero_matrix.py tests ours.
        "zero_allow_untested_optimizer": True,
        # Skip an update if a gradient is not finite, as DeepSpeed always does in float32; `Guard` then ends the run.
        "bf16": {"enabled": is_bfloat16, "check_grad_overflow": True},
        "wall_clock_breakdown": False,
        "steps_per_print": None,
    }
    if is_bfloat16 and steps > 1:  # sums of bfloat16 numbers would lose the small ones
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings
