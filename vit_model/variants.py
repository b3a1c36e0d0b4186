"""Named architectures, such as "B/16", "R50+B/16" and "R152x2", and the fields that a name fixes."""

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
"""The families of architectures: the name in a configuration, and the name for people."""


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
