"""The optimizer of a training: its settings, and presets from papers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from vit_model.fields import Frozen, execution, later

Preset = Literal["paper", "paper_finetuning", "augreg", "deit", "mae", "moco_v3"]

# Each source's optimizer settings; its rates, batches and augmentation are in docs/training.md.
PRESETS: dict[Preset, dict[str, Any]] = {
    # Dosovitskiy et al. 2021, Table 3, the rows of JFT; ImageNet-21k's have weight_decay 0.03, and ImageNet's 0.3,
    # cosine and clip_norm 1.
    "paper": {
        "weight_decay": 0.1,
        "betas": (0.9, 0.999),
        "warmup_steps": 10_000,
        "schedule": "linear",
        "clip_norm": None,
    },
    # The same, section B.1.1. The paper states no warm-up, the authors' code 500 steps.
    "paper_finetuning": {"name": "sgd", "momentum": 0.9, "weight_decay": 0.0, "warmup_steps": 500},
    # Steiner et al. 2022, section 3: weight_decay is 0.1 or 0.03.
    "augreg": {"weight_decay": 0.1, "betas": (0.9, 0.999), "warmup_steps": 10_000},
    # Touvron et al. 2021, Table 9: 5 of 300 epochs of warm-up.
    "deit": {"weight_decay": 0.05, "betas": (0.9, 0.999), "warmup_fraction": 5 / 300, "clip_norm": None},
    # He et al. 2022, Table 8: 40 of 800 epochs of warm-up.
    "mae": {"weight_decay": 0.05, "betas": (0.9, 0.95), "warmup_fraction": 40 / 800, "clip_norm": None},
    # Chen, Xie and He 2021, CONFIG.md of the code: 40 of 300 epochs of warm-up.
    "moco_v3": {"weight_decay": 0.1, "betas": (0.9, 0.999), "warmup_fraction": 40 / 300, "clip_norm": None},
}
FOR_RESNETS: tuple[Preset, ...] = ("paper", "paper_finetuning")


class Optimizer(Frozen):
    """AdamW, SGD or Muon, with a linear warm-up and a schedule. How to copy another recipe: docs/training.md."""

    preset: Preset | None = execution(None, description="a paper's settings of the optimizer, for missing fields")
    name: Literal["adamw", "sgd", "muon"] = later(
        "adamw",
        description="muon: Muon for the matrices of a ViT's blocks, AdamW for all other weights; needs zero_stage 0",
    )
    momentum: float = later(
        default_factory=lambda given: 0.95 if given.get("name") == "muon" else 0.9,
        ge=0,
        lt=1,
        description="for sgd, without dampening or Nesterov, default 0.9; for muon, with Nesterov, default 0.95",
    )
    weight_decay: float = Field(
        default_factory=lambda given: 0.0 if given.get("name") == "sgd" else 0.05,
        ge=0,
        description="multiplied by each step's learning rate, as in torch, timm and Hugging Face: big_vision's wd"
        " divided by its lr. Applies to kernels; with objective contrastive to every parameter, as in MoCo v3. The"
        " default is 0.05; with sgd, which adds it times the weights to the gradient, 0",
    )
    decay: Literal["times_rate", "times_schedule"] = later(
        "times_rate",
        description="times_schedule: weight_decay is multiplied by the schedule, which rises to 1, and not by"
        " learning_rate: big_vision's wd as it is",
    )
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    warmup_fraction: float = Field(0.1, ge=0, lt=1, description="fraction of the steps")
    warmup_steps: int | None = later(None, ge=0, description="instead of warmup_fraction")
    schedule: Literal["cosine", "linear", "constant", "rsqrt"] = Field(
        "cosine",
        description="after the warm-up: down to 0 along a cosine or a line; constant; or rsqrt, 1 / sqrt(1 + s /"
        " timescale) after s more steps",
    )
    timescale: int = later(10_000, ge=1, description="the timescale of rsqrt, in steps")
    cooldown_fraction: float = later(
        0.0,
        ge=0,
        le=1,
        description="fraction of the steps, at the end, in which constant and rsqrt fall linearly to 0",
    )
    clip_norm: float | None = Field(
        1.0,
        gt=0,
        description="gradients with a larger global norm are scaled down to this norm; null: no clipping",
    )
    layer_decay: float = later(
        1.0,
        gt=0,
        le=1,
        description="each layer of a ViT has this times the learning rate of the next one; the embeddings have the"
        " lowest, the head has learning_rate (BEiT, MAE)",
    )
    base_width: int | None = later(
        None,
        ge=1,
        description="muP (Yang et al. 2022, Table 3): the width at which learning_rate and weight_decay were tuned. The"
        " matrices of a ViT's blocks and its classifier have the rate times base_width / width, and the decay times"
        " width / base_width. Widen a model by more heads: a head's width must be the tuned model's. For adamw",
    )
    ema: float | None = later(
        None,
        gt=0,
        lt=1,
        description="the result, and what dev is scored with, is an exponential moving average of the weights with"
        " this decay, such as 0.9999; until step t + 1 the decay is at most (1 + t) / (10 + t)",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, fields: Any) -> Any:
        """Fill missing fields with the preset's settings."""
        if not isinstance(fields, dict) or fields.get("preset") not in PRESETS:
            return fields
        settings = dict(PRESETS[fields["preset"]])
        if "warmup_fraction" in fields:
            settings.pop("warmup_steps", None)
        if fields.get("warmup_steps") is not None:
            settings.pop("warmup_fraction", None)
        return settings | fields

    @model_validator(mode="after")
    def _fields_fit(self) -> Self:
        if self.warmup_steps is not None and self.warmup_fraction != 0.1:
            raise ValueError(f"warmup_fraction {self.warmup_fraction} and warmup_steps {self.warmup_steps}: give one")
        if self.cooldown_fraction and self.schedule in ("cosine", "linear"):
            raise ValueError(
                f"cooldown_fraction {self.cooldown_fraction}: schedule {self.schedule} ends at 0 by itself; use it"
                " with constant or rsqrt"
            )
        if self.timescale != 10_000 and self.schedule != "rsqrt":
            raise ValueError(f"timescale {self.timescale} is for schedule rsqrt; schedule is {self.schedule}")
        if self.name == "sgd":
            if self.betas != (0.9, 0.95):
                raise ValueError(f"betas {list(self.betas)} are for adamw; sgd has momentum")
            if self.decay == "times_schedule":
                raise ValueError("decay times_schedule: sgd adds the decay to the gradient; use times_rate")
        if self.name != "adamw" and self.base_width is not None:
            raise ValueError(f"base_width {self.base_width} is for name adamw; name is {self.name}")
        if self.name == "adamw" and self.momentum != 0.9:
            raise ValueError(f"momentum {self.momentum} is for name sgd or muon; adamw has betas")
        return self


def check_optimizer(optimizer: Optimizer, steps: int, family: str | None) -> None:
    """Raise ValueError for settings that do not fit the length of a training, or its model if that is known.

    Args:
        family: vit or resnet; None: another stage has the model.
    """
    if optimizer.warmup_steps is not None and optimizer.warmup_steps > steps:
        why = f"; preset {optimizer.preset} sets it, for long trainings: give warmup_fraction or warmup_steps"
        raise ValueError(
            f"optimizer.warmup_steps {optimizer.warmup_steps} is more than steps {steps}" + why * bool(optimizer.preset)
        )
    if family != "resnet":
        return
    if optimizer.layer_decay < 1:
        raise ValueError(f"optimizer.layer_decay {optimizer.layer_decay} needs the blocks of a ViT; model is a resnet")
    if optimizer.base_width is not None:
        raise ValueError(f"optimizer.base_width {optimizer.base_width} is for ViTs; model is a resnet")
    if optimizer.name == "muon":
        raise ValueError(
            "optimizer.name muon needs the blocks of a ViT; model is a resnet, for which there are: adamw, sgd"
        )
    if optimizer.preset is not None and optimizer.preset not in FOR_RESNETS:
        raise ValueError(
            f"optimizer.preset {optimizer.preset} is for ViTs; model is a resnet, for which there are: "
            + ", ".join(FOR_RESNETS)
        )
