"""The settings of objective dino."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from vit_model.fields import Frozen
from vit_model.sizes import ModelSize

Share = Annotated[float, Field(ge=0, le=1)]
Scale = tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]]


class DinoOptions(Frozen):
    """DINO's settings; the defaults are the authors' (main_dino.py). The head behind the ViT is discarded after
    pretraining. The rest of the authors' recipe: docs/training.md."""

    local_crops: int = Field(8, ge=0, description="smaller views of each image, beside the two global ones")
    local_size: int = Field(96, ge=1, description="side of the local views in pixels, a multiple of the patch size")
    global_scale: Scale = Field((0.4, 1.0), description="lowest and highest area of a global view, as shares")
    local_scale: Scale = Field((0.05, 0.4), description="the same of a local view")
    hidden_width: int = Field(2048, ge=1, description="width of the head's first two layers")
    bottleneck_width: int = Field(256, ge=1, description="width of the head's third layer")
    output_width: int = Field(65536, ge=2, description="outputs of the head; fewer for small datasets")
    student_temperature: float = Field(0.1, gt=0)
    teacher_temperature: float = Field(
        0.04, gt=0, description="after its warm-up; below the student's, or the outputs become uniform"
    )
    warmup_teacher_temperature: float = Field(
        0.04, gt=0, description="the teacher's temperature at first; it rises linearly"
    )
    warmup_teacher_fraction: Share = Field(0.3, description="share of the steps during which it rises")
    momentum: Share = Field(0.996, description="the initial momentum of the teacher; a cosine schedule raises it to 1")
    centre_momentum: Share = Field(
        0.9, description="momentum of the mean of the teacher's outputs, which is subtracted from them; 1: of nothing"
    )
    freeze_last_layer: Share = Field(
        0.01, description="share of the steps at the beginning that leave the head's last layer as it is"
    )

    @model_validator(mode="after")
    def _scales_ascend(self) -> Self:
        for name in ("global_scale", "local_scale"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name} [{low}, {high}] is not ascending; use [{high}, {low}]")
        return self

    def temperature(self, step: int, steps: int) -> float:
        """Return the teacher's temperature at step `step` of `steps`, counted from 0."""
        warmup = round(self.warmup_teacher_fraction * steps)
        share = step / warmup if step < warmup else 1.0
        return self.warmup_teacher_temperature + share * (self.teacher_temperature - self.warmup_teacher_temperature)

    def check(self, resolution: int, model: ModelSize | None) -> None:
        """Raise ValueError for images or a model, if it is known, that cannot have these local views."""
        if not self.local_crops:
            return
        if self.local_size > resolution:
            raise ValueError(
                f"dino.local_size {self.local_size} is more than resolution {resolution}; use a smaller multiple of the"
                " patch size, such as 3/7 of the resolution as the authors do"
            )
        if model is None:
            return
        model.check_side("dino.local_size", self.local_size)
        if model.position == "relative" and self.local_size != resolution:
            raise ValueError(
                f"model.position relative cannot be resized to the local views of {self.local_size} pixels; use another"
                f" position, dino.local_crops: 0 or dino.local_size: {resolution}"
            )
