"""The stage `evaluate`: the quality of a frozen model's features."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from pipelines.spec.augmentation import EvalCrop
from pipelines.spec.checkpoints import Backbone
from pipelines.spec.fields import Seed, distinct
from pipelines.spec.stages.base import BACKBONE, BaseStage, SeenInTraining, Shots, seen_in_training
from vit_model.fields import execution, later, takes

Probe = Literal["least squares", "k-NN", "DINO k-NN", "nearest class mean", "logistic regression"]
ProbeProtocol = Literal["leave_one_out", "dev", "big_vision", "scenic"]
# as their authors evaluate a model of 224 pixels: squash to 256, then crop the middle
_SQUASHED = {"crop": "squash", "crop_fraction": 0.875, "interpolation": "bilinear_aliased"}
PROBE_DEFAULTS: dict[str, dict[str, Any]] = {
    "dev": {"shots": (), "support": "train+dev", "linear_probe": True},
    "big_vision": {"draws": 3, "eval_crop": _SQUASHED},
    "scenic": {"draws": 1, "eval_crop": _SQUASHED},
}


class Evaluate(BaseStage):
    """Few-shot linear evaluation (paper, section 4.1) of a frozen backbone, beside raw pixels and untrained weights."""

    VERSION = 6  # untrained weights of several seeds, and the majority class
    KIND = "evaluation"
    job: Literal["evaluate"]
    data: str = takes("dataset")
    backbone: Backbone = takes("model", description=BACKBONE)
    shots: Annotated[tuple[Shots, ...], AfterValidator(distinct)] = (1, 5, 10, 25)
    draws: int = Field(20, ge=1, description="20; with protocol big_vision 3, with scenic 1")
    protocol: ProbeProtocol = later(
        "leave_one_out",
        description="how labels are drawn and L2 is chosen: by leave-one-out on them; with all labels, on dev, with a"
        " final fit to train and dev; always 1,024, as big_vision; or by the accuracy on test, as scenic, to compare"
        " with its numbers only",
    )
    classifiers: Annotated[tuple[Probe, ...], Field(min_length=1), AfterValidator(distinct)] = later(
        ("least squares",), description="on the frozen features; logistic regression takes all labels"
    )
    support: Literal["train", "train+dev"] = later(
        "train", description="the splits that labels are drawn from; test is scored"
    )
    linear_probe: bool = later(False, description="also evaluate with all labels of the support")
    retrieval: bool = later(
        False,
        description="also rank, for each test image, all other test images by cosine similarity: mean average precision"
        " (mAP), with the images of the query's class as the relevant ones",
    )
    eval_crop: EvalCrop | None = later(
        None, description="how images are made square; null: as the model's contract says"
    )
    resolution: int | None = later(
        None,
        ge=4,
        le=8192,
        description="side of the images in pixels, to which position embeddings are resized; null: the backbone's",
    )
    seen_in_training: SeenInTraining = seen_in_training()
    seed: Seed = 0
    threads: int = execution(1, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_protocol(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and isinstance(protocol := fields.get("protocol"), str):
            return PROBE_DEFAULTS.get(protocol, {}) | fields
        return fields

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.protocol == "scenic" and self.draws != 1:
            raise ValueError(
                f"draws {self.draws}: with protocol scenic it must be 1: the first images of each class are taken"
            )
        if not self.shots and not self.linear_probe:
            raise ValueError("shots: give at least one, or linear_probe: true")
        if self.protocol == "dev" and (self.shots or not self.linear_probe or self.support != "train+dev"):
            raise ValueError(
                "protocol dev needs linear_probe: true, support: train+dev and shots: [], because it chooses on all of"
                " dev; leave these fields out"
            )
        if "logistic regression" in self.classifiers and not self.linear_probe:
            raise ValueError("classifiers: logistic regression takes all labels; add linear_probe: true")
        return self
