"""The shapes of models in a recipe: sizes, or the name of a variant from a paper."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from vit_model.config import (
    ResNetConfig,
    ResNetOptions,
    ViTConfig,
    ViTOptions,
    check_vit_sizes,
    family_of,
    neighbours,
)
from vit_model.fields import later
from vit_model.variants import FAMILIES, RESNETS, variant_sizes

LARGEST_SIZE = 2**20  # of a side of a model's tensors; the longest of ViT-22B's is 24,576
Size = Annotated[int, Field(ge=1, le=LARGEST_SIZE)]


class ModelSize(ViTOptions):
    """The shape of a Vision Transformer, or the name of one (`model: B/16`); resolution and channels come from data."""

    family: Literal["vit"] = later("vit")
    patch_size: Size
    width: int = Field(ge=8, le=LARGEST_SIZE)
    depth: Size
    num_heads: Size
    mlp_ratio: float = Field(4.0, gt=0, le=1024)
    stem: tuple[Size, ...] | None = later(
        None, description="for a hybrid: units in each stage of the convolutional stem"
    )

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        sizes = variant_sizes(value)
        return sizes | {"mlp_ratio": sizes.pop("mlp_dim") / sizes["width"]}

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        check_vit_sizes(self.patch_size, self.width, self.num_heads, self.position, self.stem)
        return self

    def architecture(self, resolution: int, channels: int, num_classes: int) -> ViTConfig:
        """The model of this shape for such images, with a classifier."""
        return ViTConfig(
            image_size=resolution,
            in_channels=channels,
            mlp_dim=round(self.width * self.mlp_ratio),
            num_classes=num_classes,
            **self.model_dump(exclude={"mlp_ratio"}),
        )


class ResNetSize(ResNetOptions):
    """The shape of the paper's baseline, a ResNet of BiT, or the name of one (`model: R50x1`)."""

    units: Annotated[tuple[Size, ...], Field(min_length=1, max_length=8)]
    width_factor: Size = 1

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return variant_sizes(value) if isinstance(value, str) else value

    def architecture(self, resolution: int, channels: int, num_classes: int) -> ResNetConfig:
        """The model of this shape for such images, with a classifier."""
        return ResNetConfig(
            image_size=resolution, in_channels=channels, num_classes=num_classes, **self.model_dump()
        )


def size_of(architecture: ViTConfig | ResNetConfig, head: bool) -> ModelSize | ResNetSize:
    """Return the shape of a model, with or without the options of its head."""
    fields = architecture.model_dump(exclude={"image_size", "in_channels", "num_classes"})
    if isinstance(architecture, ResNetConfig):
        return ResNetSize.model_validate(fields if head else fields | {"head_bias": 0.0})
    fields["mlp_ratio"] = fields.pop("mlp_dim") / architecture.width
    fields |= {} if head else {"representation_head": False, "head_bias": 0.0}
    return ModelSize.model_validate(fields)


def _family(value: Any) -> str:
    return "resnet" if isinstance(value, str) and value in RESNETS else family_of(value)


Model = Annotated[
    Annotated[ModelSize, Tag("vit")] | Annotated[ResNetSize, Tag("resnet")],
    Discriminator(
        _family,
        custom_error_type="unknown_family",
        custom_error_message=f"family must be one of {', '.join(FAMILIES)}",
    ),
]


def check_patches(resolution: int, model: ModelSize | ResNetSize) -> None:
    if isinstance(model, ModelSize) and resolution % model.patch_size:
        raise ValueError(
            f"resolution {resolution} is not a multiple of patch_size {model.patch_size}:"
            f" {neighbours(resolution, model.patch_size)} would be"
        )
