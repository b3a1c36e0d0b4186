"""The shapes of models in a recipe: sizes, or the name of a variant from a paper; and which shapes share an encoder."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator

from vit_model.config import (
    BY_FAMILY,
    HEADLESS,
    Architecture,
    ResNetConfig,
    ResNetOptions,
    ViTConfig,
    ViTShape,
)
from vit_model.fields import later
from vit_model.variants import variant_sizes

LARGEST_SIZE = 2**20  # of a side of a model's tensors; the longest of ViT-22B's is 24,576
Size = Annotated[int, Field(ge=1, le=LARGEST_SIZE)]


class ModelSize(ViTShape):
    """The shape of a Vision Transformer, or the name of one (`model: B/16`); resolution and channels come from data."""

    family: Literal["vit"] = later("vit")
    patch_size: Size
    width: int = Field(ge=8, le=LARGEST_SIZE)
    depth: Size
    num_heads: Size
    stem: tuple[Size, ...] | None = later(
        None, description="for a hybrid: units in each stage of the convolutional stem"
    )
    mlp_ratio: float = Field(4.0, gt=0, le=1024)

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        sizes = variant_sizes(value)
        return sizes | {"mlp_ratio": sizes.pop("mlp_dim") / sizes["width"]}

    def architecture(self, resolution: int, channels: int, num_classes: int) -> ViTConfig:
        """Return the configuration of this shape for the given images, with a classifier."""
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
        """Return the configuration of this shape for the given images, with a classifier."""
        return ResNetConfig(image_size=resolution, in_channels=channels, num_classes=num_classes, **self.model_dump())


def size_of(architecture: Architecture, head: bool) -> ModelSize | ResNetSize:
    """Return the shape of a model, with or without the options of its head."""
    fields = architecture.model_dump(exclude={"image_size", "in_channels", "num_classes"})
    if not head:
        fields |= {name: HEADLESS[name] for name in fields.keys() & HEADLESS.keys()}
    if isinstance(architecture, ResNetConfig):
        return ResNetSize.model_validate(fields)
    fields["mlp_ratio"] = fields.pop("mlp_dim") / architecture.width
    return ModelSize.model_validate(fields)


Model = Annotated[Annotated[ModelSize, Tag("vit")] | Annotated[ResNetSize, Tag("resnet")], BY_FAMILY]


# Fields that do not change the encoder's function of its weights. The image size only changes the positions.
_NOT_ENCODER = {
    *("image_size", "num_classes", "representation_head", "head_bias"),
    *("dropout", "stochastic_depth", "layer_scale", "position_resize"),
}


def different_encoders(ours: Architecture, theirs: Architecture) -> str:
    """Describe the fields in which two configurations differ as encoders, with both values; empty if in none.

    Weights of `theirs`, which messages call the backbone, have another meaning in `ours` if there is such a field.
    """
    different = ["family"]
    if ours.family == theirs.family:
        different = [
            name
            for name in type(ours).model_fields
            if name not in _NOT_ENCODER and getattr(ours, name) != getattr(theirs, name)
        ]
    # The initial value of layer_scale does not matter, only whether there is one.
    if isinstance(ours, ViTConfig) and isinstance(theirs, ViTConfig):
        different += ["layer_scale"] * ((ours.layer_scale is None) != (theirs.layer_scale is None))
    return ", ".join(
        f"{name} is {getattr(theirs, name)!r} in the backbone, {getattr(ours, name)!r} in the model"
        for name in different
    )
