"""The stage `import`: convert pretrained weights to a model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from pipelines.spec.fields import checkpoint
from pipelines.spec.stages.base import BaseStage
from vit_model.fields import Frozen, execution, later

# "half" for the authors' ViTs (BiT, AugReg, most of timm's), "imagenet" for torchvision, DeiT and DINO.
MEAN_AND_STD = {
    "half": {"mean": (0.5,), "std": (0.5,)},
    "imagenet": {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)},
}


class GivenPreprocessing(Frozen):
    """The preprocessing of an imported model whose file does not state it: mean and std, or half, or imagenet.

    `null` means the file's value, or bilinear and squash if the file has none.
    """

    mean: tuple[float, ...] = Field(
        min_length=1, description="mean of x / 255, one value per channel or one for all channels"
    )
    std: tuple[Annotated[float, Field(gt=0)], ...] = Field(min_length=1, description="like mean")
    interpolation: Literal["bilinear", "bicubic"] | None = None
    crop: Literal["squash", "center"] | None = Field(
        None,
        description="squash: resize straight to the square; center: resize the shorter side, then crop the center",
    )
    crop_fraction: float | None = Field(
        None, gt=0, le=1, description="with center: the fraction of the shorter side that is kept"
    )

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value not in MEAN_AND_STD:
            raise ValueError(
                f"{value!r} is unknown; expected {', '.join(MEAN_AND_STD)}, or {{mean: [0.5], std: [0.5]}}"
            )
        return MEAN_AND_STD[value]


UNSTATED = (
    "does not give the mean and std of its images, and wrong values lower the accuracy without an error. Give"
    " --preprocessing half (0.5 and 0.5: Google's, AugReg's and most of timm's ViTs), imagenet (DeiT, DINO,"
    " torchvision) or a file with them; in a recipe, preprocessing: half"
)
"""The message about the path of an import without mean and std."""
ONE_FILE = "weights"  # used instead of the name of a single imported file, so that renaming it changes no key


class Import(BaseStage):
    """Import pretrained weights: Google's .npz, timm's, a Hugging Face folder, safetensors."""

    VERSION = 2
    KIND = "model"
    job: Literal["import"]
    path: Annotated[str, AfterValidator(checkpoint)] = execution(
        description="a file or a folder, local or on S3, or hf:ORG/NAME[@REVISION]; the key depends on its content,"
        " not on its location"
    )
    preprocessing: GivenPreprocessing | None = Field(
        None, description="half, imagenet, or mean and std; null: as the file states; fails if it does not"
    )
    averages: bool = later(
        True,
        description="if a checkpoint has weights and their moving averages (timm, DeiT), take the averages, as timm"
        " does; false: the weights",
    )
