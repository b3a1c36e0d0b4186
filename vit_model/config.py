"""Configurations of models: frozen pydantic models that every process reads, free of torch.

In: keyword arguments or JSON. Out: `ViTConfig` or `ResNetConfig`.
Use: `ViTConfig.variant("B/16", image_size=224, num_classes=1000)`.
"""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from vit_model.fields import Frozen, later
from vit_model.variants import (
    FAMILIES,
    RESNETS,
    BottleneckStage,
    bottleneck_stages,
    stem_channels,
    stem_parameters,
    stem_stride,
    variant_sizes,
)

PositiveInt = Annotated[int, Field(gt=0)]
Probability = Annotated[float, Field(ge=0, lt=1)]


HEADLESS: dict[str, Any] = {"representation_head": False, "head_bias": 0.0}
"""The options of a model with a new head or none."""


class ViTOptions(Frozen):
    """Options of a ViT beside its size. The defaults are the paper's model."""

    pooling: Literal["cls", "gap", "map"] = "cls"
    """The source of the representation: the class token, the mean of the patches' tokens, or the tokens that a learned
    query attends to ("map", Zhai et al. 2022)."""
    class_token: bool = later(default_factory=lambda fields: fields.get("pooling", "cls") == "cls")
    """Whether the sequence begins with a class token; by default if pooling is "cls". The mean never includes it."""
    class_position: bool = later(default_factory=lambda fields: bool(fields.get("class_token")))
    """Whether the class token has an entry of its own in a learned 1-D table; the other tables never have one."""
    distillation: bool = later(False)
    """A second class token with a classifier of its own; the logits are the mean of both (DeiT)."""
    registers: Annotated[int, Field(ge=0)] = later(0)
    """The number of extra learned tokens, which have no position (Darcet et al. 2024; DINOv2)."""
    position: Literal["none", "learned1d", "learned2d", "sincos2d", "sincos2d_moco", "relative", "rope"] = later(
        "learned1d"
    )
    """The position embedding (section D.4). "sincos2d" is big_vision's fixed table, "sincos2d_moco" MoCo v3's;
    "relative" adds query times an embedding of the distance along the raster to the attention's scores; "rope" turns
    the queries and keys of patches (DINOv3, `vit_model.blocks.rope`)."""
    position_at: Literal["stem", "every_layer", "shared"] = later("stem")
    """Where positions are added: once before the first block, or to every block's input, from a table for each block
    or from a shared one."""
    position_resize: Literal["bilinear", "bicubic", "bicubic_antialias"] = later("bilinear")
    """How a learned 1-D table is resized to another grid: like the authors (aligned corners), Hugging Face or timm."""
    norm_first: bool = later(False)
    """A layer norm between the embeddings and the first block (CLIP)."""
    norm_after_pooling: bool = later(False)
    """The last layer norm comes after the mean over tokens and not before it (MAE; timm's `fc_norm`)."""
    patch_bias: bool = later(True)
    layer_scale: Annotated[float, Field(gt=0)] | None = later(None)
    """The initial factor of each channel of a residual branch (Touvron et al. 2021); null: no factor."""
    residual: bool = later(True)
    """False removes the connections around attention and MLP, for ablations."""
    axial: bool = later(False)
    """Each block becomes two, one attending along rows and one along columns (section D.6)."""
    gelu: Literal["tanh", "exact", "quick", "swiglu"] = "tanh"
    """"tanh" is what the authors' code computes; timm and Hugging Face use "exact", OpenAI's CLIP "quick", which is
    x * sigmoid(1.702 * x). "swiglu" replaces the GELU by SiLU(a matrix times x) * (another matrix
    times x), before a third matrix (Shazeer 2020; DINOv3's largest models)."""
    layer_norm_eps: Annotated[float, Field(gt=0)] = later(1e-6)
    dropout: Probability = later(0.0)
    stochastic_depth: Probability = later(0.0)
    """The probability of dropping the last block's branches in training; the first block's is 0, linear between."""
    representation_head: bool = later(False)
    """A tanh layer of width D before the classifier: the paper's head for pretraining."""
    head_bias: float = later(0.0)
    """What the classifier's bias starts from."""

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        for wrong, message in self._contradictions():
            if wrong:
                raise ValueError(message)
        return self

    def _contradictions(self) -> tuple[tuple[bool, str], ...]:
        return (
            (self.pooling == "cls" and not self.class_token, "pooling 'cls' needs class_token true"),
            (self.class_position and not self.class_token, "class_position true needs class_token true"),
            (self.distillation and self.pooling != "cls", "distillation needs pooling 'cls'"),
            (
                self.norm_after_pooling and self.pooling != "gap",
                f"norm_after_pooling needs pooling 'gap'; pooling is {self.pooling!r}",
            ),
            (
                self.position_at != "stem" and not self.position.startswith("learned"),
                f"position_at {self.position_at!r} needs learned tables; position is {self.position!r}",
            ),
            (
                self.axial and (self.class_token or self.registers > 0 or self.position in ("relative", "rope")),
                "axial blocks attend along rows and columns of the grid, so they cannot be combined with class_token,"
                " registers or position 'relative' or 'rope'; use pooling 'gap'",
            ),
            (
                self.axial and self.stochastic_depth > 0,
                f"stochastic_depth {self.stochastic_depth} cannot be combined with axial blocks; use 0",
            ),
        )


class ViTShape(ViTOptions):
    """The shape of a ViT or of a hybrid, independent of its images and classes."""

    family: Literal["vit"] = "vit"
    patch_size: PositiveInt
    """Side of a token's square of pixels; in a hybrid, the stride of the stem times the side of its patches."""
    width: PositiveInt
    depth: PositiveInt
    num_heads: PositiveInt
    stem: tuple[PositiveInt, ...] | None = None
    """A hybrid's units in each stage of its convolutional stem ("R50": 3, 4, 6, 3); null: patches of pixels."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.width % self.num_heads:
            divisors = [n for n in range(1, min(self.width, 1024) + 1) if self.width % n == 0]
            nearest = min(divisors, key=lambda n: abs(n - self.num_heads))
            raise ValueError(f"width {self.width} is not a multiple of num_heads {self.num_heads}; {nearest} would fit")
        if self.position in ("learned2d", "sincos2d", "sincos2d_moco") and self.width % 4:
            raise ValueError(f"width {self.width} is not a multiple of 4, which position {self.position!r} needs")
        if self.position == "rope" and (of_head := self.width // self.num_heads) % 4:
            raise ValueError(f"the width of a head, {of_head}, is not a multiple of 4, which position 'rope' needs")
        if self.stem is not None and self.patch_size % (stride := stem_stride(self.stem)):
            raise ValueError(
                f"patch_size {self.patch_size} is not a multiple of {stride}, the stride of a stem with"
                f" {len(self.stem)} stages"
            )
        return self

    def check_side(self, name: str, side: int) -> None:
        """Raise ValueError if a side of images, which the message calls `name`, is not a whole number of patches."""
        if side % self.patch_size:
            below = side // self.patch_size * self.patch_size
            fitting = f"{below} or {below + self.patch_size}" if below else f"{self.patch_size}"
            raise ValueError(f"{name} {side} is not a multiple of patch_size {self.patch_size}; {fitting} would fit")


class _ForImages(Frozen):
    """The fields of an architecture beside its shape: the size of its input images and the number of classes."""

    image_size: PositiveInt | tuple[PositiveInt, PositiveInt]
    """Side of the square, or (height, width), in pixels."""
    in_channels: PositiveInt = 3
    num_classes: Annotated[int, Field(ge=0)] = 0
    """0 leaves the head out: `forward` then returns the representation."""

    @classmethod
    def variant(cls, name: str, *, image_size: int | tuple[int, int], **fields: Any) -> Self:
        """Return the named model of the papers, e.g. "Ti/16", "R50+B/16" or "R50x1", with other fields given by name.

        Raises ValueError for a name that is not in `VARIANTS` or `RESNETS` or names another family, and for a field
        that the name already fixes.
        """
        fixed = variant_sizes(name)
        if fixed["family"] != cls.model_fields["family"].default:
            raise ValueError(f"variant {name!r} is a {FAMILIES[fixed['family']]}, not for a {cls.__name__}")
        if both := sorted(fixed.keys() & fields.keys()):
            raise ValueError(
                f"variant {name!r} already fixes {', '.join(both)}; for other sizes use {cls.__name__}(...)"
            )
        return cls(image_size=image_size, **fixed, **fields)

    @property
    def image_shape(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return (self.image_size, self.image_size) if isinstance(self.image_size, int) else self.image_size

    def for_finetuning(self, image_size: int, num_classes: int) -> Self:
        """Return the same encoder at another resolution, with a new classifier and without the tanh layer before it
        (section 3.2)."""
        changed = HEADLESS | {"image_size": image_size, "num_classes": num_classes}
        fields = self.model_dump()
        return type(self).model_validate(fields | {name: changed[name] for name in fields.keys() & changed.keys()})


class ViTConfig(_ForImages, ViTShape):
    """The architecture of a ViT (arXiv 2010.11929, section 3.1), or of a hybrid."""

    mlp_dim: PositiveInt

    @model_validator(mode="after")
    def _image_fits(self) -> Self:
        for side in self.image_shape:
            self.check_side("image_size", side)
        return self

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches."""
        height, width = self.image_shape
        return height // self.patch_size, width // self.patch_size

    @property
    def num_patches(self) -> int:
        rows, columns = self.grid
        return rows * columns

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens before the patches': class token, distillation token, registers, in this order."""
        return self.class_token + self.distillation + self.registers

    @property
    def num_tokens(self) -> int:
        """Length of the sequence."""
        return self.num_prefix_tokens + self.num_patches

    @property
    def stem_stride(self) -> int:
        """Pixels between neighbours of the convolutional stem's output; 1 without a stem."""
        return 1 if self.stem is None else stem_stride(self.stem)

    @property
    def num_class_positions(self) -> int:
        """Entries of a learned 1-D table that belong to class tokens."""
        return self.class_position * (self.class_token + self.distillation)

    @property
    def adds_positions(self) -> bool:
        """Whether positions are added to tokens; otherwise attention has them, or nothing does."""
        return self.position not in ("none", "relative", "rope")

    @property
    def is_gated(self) -> bool:
        """Whether MLPs have three matrices."""
        return self.gelu == "swiglu"

    @property
    def num_blocks(self) -> int:
        """Blocks built: `depth`, or twice as many with axial attention."""
        return self.depth * (1 + self.axial)

    @property
    def num_parameters(self) -> int:
        """All trainable numbers, heads included."""
        width, mlp = self.width, self.mlp_dim
        norm, attention = 2 * width, 4 * (width * width + width)
        mlp_layers = (1 + self.is_gated) * (width * mlp + mlp) + mlp * width + width
        block = attention + mlp_layers + 2 * norm + 2 * width * (self.layer_scale is not None)
        relative = (2 * self.num_tokens - 1) * (width // self.num_heads) * (self.position == "relative")
        patch = (self.patch_size // self.stem_stride) ** 2
        channels = self.in_channels if self.stem is None else stem_channels(self.stem)
        total = channels * patch * width + width * self.patch_bias
        total += 0 if self.stem is None else stem_parameters(self.stem, self.in_channels)
        total += self.num_prefix_tokens * width + self._position_parameters()
        total += self.num_blocks * (block + relative) + norm * (1 + self.norm_first)
        total += (width + attention + mlp_layers + norm) * (self.pooling == "map")
        total += (width * width + width) * self.representation_head
        return total + self.num_classes * (width + 1) * (1 + self.distillation)

    def _position_parameters(self) -> int:
        """Parameters of the learned tables, without relative ones."""
        tables = self.num_blocks if self.position_at == "every_layer" else 1
        rows, columns = self.grid
        if self.position == "learned1d":
            return tables * (self.num_patches + self.num_class_positions) * self.width
        if self.position == "learned2d":
            return tables * (rows + columns) * (self.width // 2)
        return 0


LoRATarget = Literal["query", "key", "value", "proj"]


class LoRAOptions(Frozen):
    """The settings of LoRA (Hu et al. 2022). The defaults follow published tables of ViTs on VTAB-1k."""

    rank: PositiveInt = Field(8, description="the rank of the added matrices B A")
    scale: float = Field(
        1.0, gt=0, description="the factor of B A: alpha / rank of Hu et al. and peft, the scale of FacT"
    )
    targets: Annotated[tuple[LoRATarget, ...], Field(min_length=1)] = Field(
        ("query", "value"), description="the matrices of attention that are changed, in every block"
    )
    dropout: Probability = Field(0.0, description="dropout of the input of A, as in Hu et al., peft and NOAH")

    @model_validator(mode="after")
    def _targets_differ(self) -> Self:
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets {list(self.targets)} contains duplicates")
        return self


class MaeOptions(Frozen):
    """A masked autoencoder's settings (He et al. 2022); the defaults are the authors'. The decoder is discarded after
    pretraining."""

    mask_fraction: float = Field(
        0.75, gt=0, lt=1, description="share of masked patches; the encoder sees the others, rounded down"
    )
    decoder_width: PositiveInt = Field(512, multiple_of=4)
    decoder_depth: PositiveInt = Field(
        8,
        description="number of blocks; 1 is faster and as good for fine-tuning, but not for a linear classifier",
    )
    decoder_heads: PositiveInt = 16
    normalise: bool = Field(
        True, description="the targets are each patch's pixels minus their mean, divided by their deviation"
    )

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.decoder_width % self.decoder_heads:
            raise ValueError(
                f"decoder_width {self.decoder_width} is not a multiple of decoder_heads {self.decoder_heads}"
            )
        return self

    def visible(self, num_patches: int) -> int:
        """Return how many of an image's patches the encoder sees."""
        # Floating-point error must not round 10 * (1 - 0.9) down to 0.
        return math.floor(num_patches * (1 - self.mask_fraction) + 1e-9)

    def decoder(self, encoder: ViTConfig) -> ViTConfig:
        """Return the shape of the decoder's blocks: MLPs four times as wide, GELU and norms as the encoder's."""
        return ViTConfig(
            image_size=encoder.image_size,
            patch_size=encoder.patch_size,
            in_channels=encoder.in_channels,
            width=self.decoder_width,
            depth=self.decoder_depth,
            num_heads=self.decoder_heads,
            mlp_dim=4 * self.decoder_width,
            pooling="gap",
            position="sincos2d_moco",
            gelu=encoder.gelu,
            layer_norm_eps=encoder.layer_norm_eps,
        )

    def check(self, encoder: ViTConfig) -> None:
        """Raise ValueError for an encoder that cannot be trained in this way."""
        patches = encoder.num_patches
        visible = self.visible(patches)
        for wrong, message in (
            (
                encoder.num_classes or encoder.representation_head or encoder.pooling == "map",
                f"has no head: num_classes is {encoder.num_classes}, representation_head"
                f" {encoder.representation_head}, pooling {encoder.pooling!r}; use 0, False, and 'cls' or 'gap'",
            ),
            (
                encoder.position in ("relative", "rope") or encoder.position_at != "stem" or encoder.axial,
                f"encodes some of the patches, which keep their positions only if these are added before the first"
                f" block: position is {encoder.position!r}, position_at {encoder.position_at!r}, axial"
                f" {encoder.axial}; use a learned or fixed position, 'stem' and False",
            ),
            (
                encoder.stem is not None,
                "must not see masked pixels, which the convolutions of a hybrid's stem spread; use stem null",
            ),
            (
                not 0 < visible < patches,
                f"needs visible and masked patches: mask_fraction {self.mask_fraction} of {patches} leaves"
                f" {visible} visible; use a higher resolution or another mask_fraction",
            ),
            (
                self.normalise and encoder.patch_size == 1,
                "cannot normalise patches of a single pixel (patch_size 1); use normalise false",
            ),
        ):
            if wrong:
                raise ValueError(f"a masked autoencoder {message}")


class ResNetOptions(Frozen):
    """The shape of a BiT ResNet, independent of its images and classes."""

    family: Literal["resnet"] = "resnet"
    units: Annotated[tuple[PositiveInt, ...], Field(min_length=1, max_length=8)]
    """Bottlenecks in each stage ("R50": 3, 4, 6, 3); each stage has half the resolution and twice the channels."""
    width_factor: PositiveInt = 1
    """The factor of all channels."""
    head_bias: float = 0.0
    """What the classifier's bias starts from."""


class ResNetConfig(_ForImages, ResNetOptions):
    """The architecture of the paper's baseline (section 4.1): a ResNet v2 with group norm, as in BiT (1912.11370).

    Its weights fit images of every size.
    """

    @property
    def stages(self) -> list[BottleneckStage]:
        """The body, in order."""
        return bottleneck_stages(self.units, self.width_factor)

    @property
    def width(self) -> int:
        """Channels of the last feature map, which is the size of the representation."""
        return 4 * self.stages[-1].middle

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of the last feature map."""
        stride = stem_stride(self.units)  # a hybrid's stem has the same body
        height, width = self.image_shape
        return -(-height // stride), -(-width // stride)

    @property
    def num_blocks(self) -> int:
        """Bottlenecks built."""
        return sum(self.units)

    @property
    def num_parameters(self) -> int:
        """All trainable numbers, head included."""
        total = 7 * 7 * self.in_channels * 64 * self.width_factor
        for stage in self.stages:
            norms = stage.in_channels + (stage.units - 1) * stage.out_channels + stage.units * 2 * stage.middle
            total += stage.kernel_parameters + 2 * norms
        return total + 2 * self.width + self.num_classes * (self.width + 1)


def family_of(model: Any) -> str:
    """Return the family of a configuration or shape (a dict or a model) or of a variant's name; by default "vit"."""
    if isinstance(model, str):
        return "resnet" if model in RESNETS else "vit"
    return str(model.get("family", "vit") if isinstance(model, dict) else getattr(model, "family", "vit"))


BY_FAMILY = Discriminator(
    family_of,
    custom_error_type="unknown_family",
    custom_error_message=f"family must be one of {', '.join(FAMILIES)}",
)
Architecture = Annotated[Annotated[ViTConfig, Tag("vit")] | Annotated[ResNetConfig, Tag("resnet")], BY_FAMILY]
"""Every architecture that `vit_model.build.build` can build."""
