"""What a model is: frozen pydantic models that every process reads, and none of them needs torch.

In: keyword arguments or JSON. Out: `ViTConfig` (the architecture), `Preprocessing` (pixels to input) and
`ModelContract` (a model artifact's config.json: both of them, the class names, where the weights came from).
Use: `ViTConfig.variant("B/16", image_size=224, num_classes=1000)`.
"""

from difflib import get_close_matches
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Size(NamedTuple):
    width: int
    depth: int
    num_heads: int
    mlp_dim: int


# B, L, H: Dosovitskiy et al. 2021, table 1. Ti, S: Steiner et al. 2021 ("How to train your ViT"), table 1.
SIZES = {
    "Ti": Size(width=192, depth=12, num_heads=3, mlp_dim=768),
    "S": Size(width=384, depth=12, num_heads=6, mlp_dim=1536),
    "B": Size(width=768, depth=12, num_heads=12, mlp_dim=3072),
    "L": Size(width=1024, depth=24, num_heads=16, mlp_dim=4096),
    "H": Size(width=1280, depth=32, num_heads=16, mlp_dim=5120),
}
PATCH_SIZES = (32, 16, 14, 8, 4, 2)
VARIANTS = tuple(f"{size}/{patch}" for size in SIZES for patch in PATCH_SIZES)

PositiveInt = Annotated[int, Field(gt=0)]


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ViTConfig(Frozen):
    """The architecture of a ViT (arXiv 2010.11929, section 3.1). Images and patches are square, in pixels."""

    image_size: PositiveInt
    patch_size: PositiveInt
    in_channels: PositiveInt = 3
    width: PositiveInt
    depth: PositiveInt
    num_heads: PositiveInt
    mlp_dim: PositiveInt
    num_classes: Annotated[int, Field(ge=0)] = 0
    """0 leaves the head out: `forward` then returns the representation."""
    pooling: Literal["cls", "gap"] = "cls"
    """"gap" has no class token; the mean is taken after the encoder norm, as in the authors' code."""
    representation_head: bool = False
    """A tanh layer of width D before the classifier: the paper's head for pretraining."""
    position: Literal["learned1d"] = "learned1d"
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    layer_norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    gelu: Literal["tanh", "exact"] = "tanh"
    """"tanh" is what the authors' code computes; timm and Hugging Face use "exact"."""
    head_bias: float = 0.0
    """What the classifier's bias starts from."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        image, patch = self.image_size, self.patch_size
        if image % patch:
            below, above = image // patch * patch, (image // patch + 1) * patch
            fitting = f"{below} or {above}" if below else f"{above}"
            raise ValueError(
                f"image_size {image} is not a multiple of patch_size {patch}; {fitting} would fit"
            )
        if self.width % self.num_heads:
            divisors = [n for n in range(1, min(self.width, 1024) + 1) if self.width % n == 0]
            nearest = min(divisors, key=lambda n: abs(n - self.num_heads))
            raise ValueError(
                f"width {self.width} is not a multiple of num_heads {self.num_heads}; {nearest} would fit"
            )
        return self

    @classmethod
    def variant(cls, name: str, *, image_size: int, **fields: Any) -> Self:
        """The named model of the papers, e.g. "Ti/16", with any other field given by name.

        Raises ValueError for a name that is not in `VARIANTS` and for a field that the name already fixes.
        """
        if name not in VARIANTS:
            near = get_close_matches(name, VARIANTS, n=1, cutoff=0.0)
            raise ValueError(
                f"unknown variant {name!r}; the nearest is {near[0]!r}, all are {', '.join(VARIANTS)}"
            )
        size, patch = name.split("/")
        fixed = {"patch_size": int(patch), **SIZES[size]._asdict()}
        if both := sorted(fixed.keys() & fields.keys()):
            raise ValueError(
                f"variant {name!r} already fixes {', '.join(both)}; for other sizes use ViTConfig(...)"
            )
        return cls(image_size=image_size, **fixed, **fields)

    @property
    def grid(self) -> int:
        """Patches along one side."""
        return self.image_size // self.patch_size

    @property
    def num_tokens(self) -> int:
        """Length of the sequence, class token included."""
        return self.grid**2 + (self.pooling == "cls")

    @property
    def num_parameters(self) -> int:
        """All trainable numbers, heads included."""
        width, mlp = self.width, self.mlp_dim
        patch_embedding = self.in_channels * self.patch_size**2 * width + width
        tokens = self.num_tokens * width + (self.pooling == "cls") * width
        block = 4 * (width * width + width) + 2 * width * mlp + mlp + width + 2 * 2 * width
        representation = self.representation_head * (width * width + width)
        head = self.num_classes * (width + 1)
        return patch_embedding + tokens + self.depth * block + 2 * width + representation + head


class Preprocessing(Frozen):
    """How an image becomes a model's input: resize and crop to a square, then (x / 255 - mean) / std."""

    mean: tuple[float, ...]
    std: tuple[Annotated[float, Field(gt=0)], ...]
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    crop: Literal["squash", "center"] = "squash"
    """"squash": straight to the square. "center": shorter side to resolution / crop_fraction, then crop."""
    crop_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    resolution: PositiveInt
    channels: Literal[1, 3]

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        for name in ("mean", "std"):
            if len(getattr(self, name)) != self.channels:
                raise ValueError(
                    f"{name} {getattr(self, name)} must have {self.channels} values, as many as channels"
                )
        if self.crop == "squash" and self.crop_fraction != 1.0:
            raise ValueError(
                f"crop_fraction {self.crop_fraction} has no meaning with crop 'squash'; 'center' uses it"
            )
        return self


class ModelContract(Frozen):
    """A model artifact's config.json: all that is needed to use its weights, and where they came from."""

    architecture: ViTConfig
    class_names: tuple[str, ...]
    """In the order of the logits; empty for a model without a head."""
    preprocessing: Preprocessing
    training_data: str
    """Content digest of the dataset that the weights were trained on."""
    license: str | None
    format_version: Literal[1] = 1

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        model, pixels = self.architecture, self.preprocessing
        if len(self.class_names) != model.num_classes:
            raise ValueError(
                f"class_names has {len(self.class_names)} names, num_classes is {model.num_classes}"
            )
        if pixels.channels != model.in_channels:
            raise ValueError(
                f"preprocessing.channels is {pixels.channels}, architecture.in_channels {model.in_channels}"
            )
        if pixels.resolution != model.image_size:
            raise ValueError(
                f"preprocessing.resolution is {pixels.resolution}, architecture.image_size {model.image_size}"
            )
        return self
