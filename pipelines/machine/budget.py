"""What trainings take on this machine: its devices, a measured speed, and the run time that follows."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pipelines.files.hashing import read_cache, write_cache
from pipelines.spec import AnyStage, Detect, Finetune, Pretrain, quantity
from vit_model import compute
from vit_model.config import Architecture, MaeOptions, ViTConfig
from vit_model.sizes import ModelSize, ResNetSize, size_of
from vit_model.variants import FAMILIES, RESNETS, SIZES

MEASURED_FLOPS = 5e10  # of a measured step, of 8 to 64 images
MOST_THREADS = 8  # of a fit: more help little with such batches
# least and most of everything but the trainings: starts of processes, ingest, pixels, report
OTHER_SECONDS = (20, 90)
CLASSES = 2  # of a head whose data set is not known yet; it takes little of the time
SLOWER = 1.25  # than measured, because images are decoded and augmented

SPEEDS = "speeds.json"  # in the cache folder
CPUINFO = Path("/proc/cpuinfo")
DType = Literal["bfloat16", "float32"]
Measure = Callable[[ModelSize | ResNetSize, int, int, int, DType], list[tuple[float, float]]]


class Machine(NamedTuple):
    """The devices for training."""

    gpus: int
    cores: int
    dtype: DType
    """Of trainings: CPUs without instructions for bfloat16 take up to ten times as long in it as in float32."""

    @property
    def dtype_line(self) -> str:
        """The field of a training, as YAML; empty for the default."""
        why = "CPUs without AVX512-BF16 or AMX are slow in bfloat16"
        return f"\n    dtype: float32  # {why}" * (self.dtype == "float32")

    def threads(self, trials: int) -> int:
        """Return the CPU threads of each of several trials; a core is left for Ray and for decoding images.

        Threads of one training wait for each other: with a busy core among theirs, they are slower than one thread.
        """
        return max(1, min(MOST_THREADS, (self.cores - 1) // (self.gpus or trials)))

    def parallel(self, trials: int) -> int:
        """Return how many trials run at the same time."""
        return self.gpus or max(1, self.cores // self.threads(trials))

    def __str__(self) -> str:
        return quantity(self.gpus, "GPU") if self.gpus else quantity(self.cores, "CPU core")


def this_machine() -> Machine:
    """Return the devices of this machine, without importing torch."""
    gpus = 0
    if shutil.which("nvidia-smi") is not None:
        gpus = len([path for path in Path("/dev").iterdir() if re.fullmatch(r"nvidia\d+", path.name)])
    is_fast = re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", CPUINFO.read_text())  # bf16: ARM
    return Machine(gpus, len(os.sched_getaffinity(0)), "bfloat16" if gpus or is_fast else "float32")


class Fits(NamedTuple):
    """The trainings of a fine-tuning: trials, and one refit; or one training without trials."""

    architecture: Architecture
    trials: int
    steps: int
    batch_size: int
    dtype: DType
    mae: MaeOptions | None = None

    @classmethod
    def of(cls, stage: Finetune | Pretrain) -> Fits | None:
        """Return the trainings of a stage; None if its fields alone do not tell their model and number."""
        trials, mae = 0, None
        if isinstance(stage, Pretrain):
            if stage.objective == "distillation" or len(stage.view_sides) > 1 or stage.auxiliary is not None:
                return None
            mae = stage.mae if stage.objective == "mae" else None
        else:
            trials = len(stage.learning_rates) * (len(stage.learning_rates) > 1)
            if stage.search or stage.early_stopping or stage.labels.per_class or stage.refits > 1:
                return None
            if isinstance(stage, Detect):
                return None  # most of its operations are the head's
        if stage.model is None or stage.resolution is None:
            return None
        architecture = stage.model.architecture(stage.resolution, 3, CLASSES)
        return cls(architecture, trials, stage.steps, stage.batch_size, stage.dtype, mae)

    @property
    def flops_per_image(self) -> int:
        """The operations of a training step."""
        return compute.train_flops(self.architecture, self.mae)

    @property
    def flops(self) -> int:
        return (self.trials + 1) * self.steps * self.batch_size * self.flops_per_image


def estimate(stages: Sequence[Fits], machine: Machine, measure: Measure | None = None) -> str | None:
    """Estimate the run time of all stages from their operations and the speed of a fine-tuning of the cheapest model.

    Args:
        measure: `ray_jobs.training.cost.images_per_second`; None: the last measurement on this machine, if any.
    """
    cheapest = min(stages, key=lambda stage: stage.flops_per_image)
    architecture, per_image = cheapest.architecture, cheapest.flops_per_image
    finetuning = compute.train_flops(architecture)
    batch_size = min(64, max(8, round(MEASURED_FLOPS / finetuning)))
    resolution = architecture.image_shape[0]
    trials, fits = max(stage.trials for stage in stages), sum(stage.trials + 1 for stage in stages)
    together = max(1, trials)  # a single training has no trials
    size, parallel = size_of(architecture, head=True), machine.parallel(together)
    setting = (size, resolution, batch_size, machine.threads(together), cheapest.dtype)
    known, name = read_cache(SPEEDS), f"{machine}: {setting}"
    if measure is not None:
        known = known | {name: measure(*setting)}
        write_cache(SPEEDS, known)
    if (rates := known.get(name)) is None:
        return None
    # A masked autoencoder's operations are the encoder's on some patches, and its decoder's.
    slowest, fastest = (
        rate * finetuning / per_image for rate in (min(now for now, _ in rates), max(alone for _, alone in rates))
    )
    rounds = max(fits / parallel, math.ceil(trials / parallel) + 1)  # a stage's refit waits for its trials
    images = sum(stage.flops for stage in stages) / per_image * rounds / fits
    range_ = _between(images / fastest + OTHER_SECONDS[0], SLOWER * images / slowest + OTHER_SECONDS[1])
    busy = ", the first if nothing else runs, the last if other programs run as now" * (fastest > 1.3 * slowest)
    lengths = {f" of {stage.steps:,} steps of {stage.batch_size} images" for stage in stages}
    return (
        f"about {range_} in all on {machine}{busy}: {quantity(fits, 'training')}"
        f"{lengths.pop() if len(lengths) == 1 else ''}, the {'smallest model' if len(stages) > 1 else 'model'} at"
        f" {slowest:,.3g} to {fastest:,.3g} images/s measured here"
    )


def estimate_unmeasured(stages: Mapping[str, AnyStage]) -> str | None:
    """Estimate the run time of stages with the speed that `init` measured, and name their shares; None without it."""
    trainings = {name: stage for name, stage in stages.items() if isinstance(stage, Finetune | Pretrain)}
    fits = {name: found for name, stage in trainings.items() if (found := Fits.of(stage)) is not None}
    if not fits or len(fits) < len(trainings):
        return None
    estimated = estimate([*fits.values()], this_machine())
    if estimated is None:
        return None
    total = sum(each.flops for each in fits.values())
    shares = ", ".join(f"{name} {each.flops / total:.0%}" for name, each in fits.items())
    return f"{estimated}; {shares} of the work"


def _between(least: float, most: float) -> str:
    """Return a range of seconds in minutes or hours."""
    if most > 360_000:
        return f"{least / 3600:,.0f} to {most / 3600:,.0f} hours"
    if most > 5400:
        return f"{least / 3600:.1f} to {most / 3600:.1f} hours"
    low, high = max(1, math.floor(least / 60)), math.ceil(most / 60)
    return f"{low} to {high} minutes" if high > low else quantity(high, "minute")


def described(architecture: Architecture, mae: MaeOptions | None = None) -> str:
    """Return a model in the terms of the field: ViT-Ti/16 at 224 pixels, its parameters and GFLOPs."""
    flops = compute.forward_flops(architecture, mae) / 1e9
    masked = " as a masked autoencoder" if mae is not None else ""
    return (
        f"{name_of(architecture)} at {architecture.image_shape[0]} pixels ({architecture.num_parameters / 1e6:,.3g} M"
        f" parameters, {flops:,.3g} GFLOPs per image{masked})"
    )


def name_of(architecture: Architecture) -> str:
    """Return the name of an architecture's size, such as ViT-B/16; without one, its width and depth."""
    family = FAMILIES[architecture.family]
    if not isinstance(architecture, ViTConfig):
        size = (architecture.units, architecture.width_factor)
        return next((f"ResNet {name}" for name, known in RESNETS.items() if known == size), family)
    fields = (architecture.width, architecture.depth, architecture.num_heads, architecture.mlp_dim)
    named = (name for name, size in SIZES.items() if size == fields and architecture.stem is None)
    if name := next(named, None):
        return f"{family}-{name}/{architecture.patch_size}"
    return f"{family} of width {architecture.width}, depth {architecture.depth}, patches of {architecture.patch_size}"
