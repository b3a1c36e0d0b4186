"""A model artifact's config.json: the architecture, preprocessing, class names, and the origin of the weights."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, model_serializer, model_validator

from vit_model.config import Architecture, PositiveInt, ViTConfig
from vit_model.errors import UserError
from vit_model.fields import Frozen, later

WEIGHTS_FILE, CONTRACT_FILE = MODEL_FILES = ("model.safetensors", "config.json")
# The largest real ones are a few hundred kB (22,000 class names); a hostile one could claim gigabytes.
MAX_CONTRACT_BYTES = 16 * 2**20


class Contract(Frozen):
    """A part of config.json. Fields declared with `later` are not written while they have their default, because the
    file's bytes are part of a model's digest."""

    @model_serializer(mode="wrap")
    def _without_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        left_out = [
            name
            for name, field in fields.items()
            if field.json_schema_extra == {"later": True} and getattr(self, name) == field.default
        ]
        return {name: value for name, value in serialize(self).items() if name not in left_out}


class Preprocessing(Contract):
    """The conversion of an image to a model's input: resize and crop to a square, then (x / 255 - mean) / std."""

    mean: tuple[float, ...]
    std: tuple[Annotated[float, Field(gt=0)], ...]
    interpolation: Literal["bilinear", "bicubic", "bilinear_aliased"] = "bilinear"
    """"bilinear_aliased": bilinear without antialiasing, rounded down, as tf.image.resize in big_vision."""
    crop: Literal["squash", "center"] = "squash"
    """"squash": to the square of resolution / crop_fraction. "center": shorter side to it. Then crop the middle."""
    crop_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    crop_offset: Literal["round", "floor"] = later("round")
    """How an odd margin's half pixel is rounded: "round" half to even (torchvision, timm) or "floor" (transformers)."""
    resolution: PositiveInt
    channels: Literal[1, 3]

    @property
    def resized(self) -> int:
        """The side of the square, or the shorter side, that is then cropped."""
        return int(self.resolution / self.crop_fraction + 1e-6)  # 384 / (384 / 448) must be 448

    @property
    def offset_matters(self) -> bool:
        """Whether the two values of crop_offset differ for images of some size."""
        return self.crop == "center" or (self.resized - self.resolution) % 4 == 3

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        for name in ("mean", "std"):
            if len(getattr(self, name)) != self.channels:
                raise ValueError(f"{name} {getattr(self, name)} must have {self.channels} values, as many as channels")
        return self


class ModelContract(Contract):
    """A model artifact's config.json: everything needed to use its weights, and their origin."""

    architecture: Architecture
    class_names: tuple[str, ...]
    """The classes in the order of the logits; empty without a classifier: a head is then a projection (CLIP)."""
    problem_type: Literal["single_label_classification", "multi_label_classification"] = later(
        "single_label_classification"
    )
    """Whether the logits go through a softmax, or a sigmoid per class; the names are Hugging Face's."""
    thresholds: tuple[Annotated[float, Field(ge=0, le=1)], ...] = later(())
    """With a sigmoid: from which probability on each class is predicted; empty: 0.5 for all."""
    mask_classes: tuple[str, ...] = later(())
    """The classes of pixels in the order of the logits, if the head reads the token of each patch (`Segmenter`)."""
    preprocessing: Preprocessing
    training_data: str
    """Content digest of the dataset that the weights were trained on; "unknown" if unknown, as for an import."""
    license: str | None
    """The authors' name for the license; null if they give none."""
    format_version: Literal[1] = 1

    @property
    def is_multi_label(self) -> bool:
        """Whether an image can have several classes."""
        return self.problem_type == "multi_label_classification"

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        model, pixels = self.architecture, self.preprocessing
        if self.class_names and len(self.class_names) != model.num_classes:
            raise ValueError(f"class_names has {len(self.class_names)} names, num_classes is {model.num_classes}")
        if self.mask_classes and not isinstance(model, ViTConfig):
            raise ValueError("mask_classes: the head of a ViT reads tokens of patches, a ResNet has none")
        if self.mask_classes and (self.class_names or len(self.mask_classes) != model.num_classes):
            raise ValueError(
                f"mask_classes has {len(self.mask_classes)} names, num_classes is {model.num_classes}; class_names must"
                " be empty"
            )
        if self.thresholds and (len(self.thresholds) != len(self.class_names) or not self.is_multi_label):
            raise ValueError(
                f"thresholds has {len(self.thresholds)} values; expected one for each of {len(self.class_names)}"
                " classes of a multi_label_classification"
            )
        if pixels.channels != model.in_channels:
            raise ValueError(
                f"preprocessing.channels is {pixels.channels}, architecture.in_channels {model.in_channels}"
            )
        if (pixels.resolution, pixels.resolution) != model.image_shape:
            raise ValueError(
                f"preprocessing.resolution is {pixels.resolution}, architecture.image_size {model.image_size}"
            )
        return self


def read_contract(folder: Path) -> ModelContract:
    """Read the contract of the model in `folder`. Raises UserError, naming the file, if it is missing or invalid."""
    try:
        return ModelContract.model_validate_json(read_contract_file(folder))
    except ValidationError as error:
        raise UserError(f"{folder / CONTRACT_FILE} is not a model contract: {error}") from error


def is_segmenter(folder: Path) -> bool:
    """Return whether a folder's config.json is of a model of pixels; False if there is none, or it cannot be read."""
    return bool(contract_fields(folder).get("mask_classes"))


def contract_fields(folder: Path) -> dict[str, Any]:
    """Return the fields of a folder's config.json as they are; {} if there is none, or it cannot be read."""
    try:
        content = json.loads(read_contract_file(folder))
    except (UserError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_contract_file(folder: Path) -> bytes:
    """Read a contract without parsing it. Raises UserError, naming the file, if it is missing or too large."""
    path = folder / CONTRACT_FILE
    if not path.is_file():
        raise UserError(f"{path} is missing: a model is a folder with {WEIGHTS_FILE} and {CONTRACT_FILE}")
    if path.stat().st_size > MAX_CONTRACT_BYTES:
        raise UserError(f"{path} has {path.stat().st_size} bytes; the limit is {MAX_CONTRACT_BYTES}")
    return path.read_bytes()
