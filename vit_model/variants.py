"""Named architectures, such as "B/16", "R50+B/16" and "R152x2", the fields that a name fixes, and a ResNet's stages."""

from difflib import get_close_matches
from typing import Any, NamedTuple


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
# Units in each stage of the convolutional stem, by the name of a hybrid (the authors' configs/models.py). With R50
# and a total stride of 16, stage 4 is left out and its units are in stage 3 (section 4.1).
HYBRIDS: dict[str, tuple[int, ...]] = {
    "R50+B/32": (3, 4, 6, 3),
    "R50+B/16": (3, 4, 9),
    "R50+L/32": (3, 4, 6, 3),
    "R50+L/16": (3, 4, 9),
    "R26+S/32": (2, 2, 2, 2),
    "R26+B/32": (2, 2, 2, 2),
    "R+Ti/16": (),
}
VARIANTS = (*(f"{size}/{patch}" for size in SIZES for patch in PATCH_SIZES), *HYBRIDS)
# The ResNets of BiT (Kolesnikov et al. 2020) by name: (units in each stage, width factor).
RESNETS: dict[str, tuple[tuple[int, ...], int]] = {
    f"R{depth}x{factor}": (units, factor)
    for depth, units in {
        50: (3, 4, 6, 3),
        101: (3, 4, 23, 3),
        152: (3, 8, 36, 3),
        200: (3, 24, 36, 3),
    }.items()
    for factor in (1, 2, 3, 4)
}
FAMILIES = {"vit": "ViT", "resnet": "ResNet"}
"""The families of architectures: name in a configuration -> name in messages."""


def variant_sizes(name: str) -> dict[str, Any]:
    """Return `family` and the fields of its configuration that a variant's name fixes.

    Raises ValueError for a name that is neither in `VARIANTS` nor in `RESNETS`.
    """
    names = (*VARIANTS, *RESNETS)
    if name not in names:
        nearest = get_close_matches(name, names, n=1, cutoff=0.0)
        raise ValueError(
            f"unknown variant {name!r}; the nearest is {nearest[0]!r}; expected one of: {', '.join(names)}"
        )
    if name in RESNETS:
        units, factor = RESNETS[name]
        return {"family": "resnet", "units": units, "width_factor": factor}
    size, patch = name.rpartition("+")[2].split("/")
    fields: dict[str, Any] = {"family": "vit", "patch_size": int(patch), **SIZES[size]._asdict()}
    if name in HYBRIDS:
        fields["stem"] = HYBRIDS[name]
    if name == "R+Ti/16":
        # Patches of 8 on a stem of stride 4: the name says 16, but tokens are 32 pixels apart.
        fields["patch_size"] = 32
    return fields


class BottleneckStage(NamedTuple):
    """A sequence of bottlenecks with three convolutions each (1x1, 3x3, 1x1), and a 1x1 shortcut around the first."""

    units: int
    in_channels: int
    middle: int
    """Channels of the 3x3 convolutions."""
    stride: int
    """Stride of the first unit: of its 3x3 convolution and of its shortcut."""

    @property
    def out_channels(self) -> int:
        return 4 * self.middle

    @property
    def kernel_parameters(self) -> int:
        """Parameters of all convolutions."""
        units, wide, middle, out = self.units, self.in_channels, self.middle, self.out_channels
        first = wide * middle + wide * out
        return first + (units - 1) * out * middle + units * (9 * middle * middle + middle * out)


def bottleneck_stages(units: tuple[int, ...], width_factor: int = 1) -> list[BottleneckStage]:
    """Return the stages of a ResNet or of a hybrid's stem, in order, after a root of 64 x `width_factor` channels."""
    stages, channels = [], 64 * width_factor
    for index, count in enumerate(units):
        middle = 64 * width_factor * 2**index
        stages.append(BottleneckStage(count, channels, middle, stride=2 if index else 1))
        channels = 4 * middle
    return stages


def stem_channels(stem: tuple[int, ...]) -> int:
    """Return the channels of the convolutional stem's output: 64 after the root, and 256 x 2^k after stage k."""
    return 64 if not stem else 256 * 2 ** (len(stem) - 1)


def stem_stride(stem: tuple[int, ...]) -> int:
    """Return the pixels between neighbours of the convolutional stem's output."""
    return 2 << max(1, len(stem))


def stem_parameters(stem: tuple[int, ...], in_channels: int) -> int:
    """Return the parameters of a hybrid's convolutional stem (`vit_model.resnet.Stem`), group norms included."""
    total = 7 * 7 * in_channels * 64 + 2 * 64
    for stage in bottleneck_stages(stem):
        norms = stage.units * (2 * stage.middle + stage.out_channels) + stage.out_channels
        total += stage.kernel_parameters + 2 * norms
    return total
