"""A detector artifact's config.json: its backbone's contract, its classes, the sizes of its parts. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from vit_model.config import Architecture, PositiveInt, ViTConfig
from vit_model.contract import CONTRACT_FILE, Contract, ModelContract, contract_fields, read_contract_file
from vit_model.errors import UserError

SCALES = (4.0, 2.0, 1.0, 0.5)
"""The sides of the pyramid's maps, as multiples of the grid of patches (ViTDet, Li et al. 2022)."""
RANGES = {SCALES[first:last] for first in range(4) for last in range(first + 1, 5)}
SHOWN = 0.5  # the least score of a detection that people are shown
GROUPS = 32  # of the head's group norms


class DetectorContract(Contract):
    """Everything needed to use a detector's weights, and their origin."""

    backbone: ModelContract
    """Without a classifier; its `training_data` and `license` are the detector's."""
    class_names: Annotated[tuple[str, ...], Field(min_length=1)]
    channels: PositiveInt = 256
    """The channels of the pyramid's maps and of the head."""
    convs: Annotated[int, Field(ge=1, le=8)] = 4
    """The convolutions in each of the head's two towers."""
    scales: Annotated[tuple[float, ...], Field(min_length=1, max_length=4)] = SCALES
    """The largest first, each half of the one before, because a map detects what is too large for the one before."""

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        check(self.backbone.architecture, self.channels, self.scales)
        if self.backbone.architecture.num_classes:
            raise ValueError("backbone: a detector's backbone has no classifier")
        return self


def check(config: Architecture, channels: int, scales: Sequence[float]) -> None:
    """Raise ValueError for a model that has no such detector."""
    if not isinstance(config, ViTConfig):
        raise ValueError("a ResNet cannot be a detector's backbone; use a plain ViT")
    if config.stem is not None:
        raise ValueError(f"a hybrid, with stem {list(config.stem)}, cannot be a detector's backbone; use a plain ViT")
    if channels % GROUPS:
        raise ValueError(f"channels {channels} is not a multiple of {GROUPS}, the groups of the head's norms")
    if tuple(scales) not in RANGES:
        raise ValueError(f"scales {[*scales]} are not neighbours among 4, 2, 1, 0.5, the largest first")
    if 4 in scales and config.width % 4:
        raise ValueError(f"width {config.width} is not a multiple of 4, which the finest map needs")
    if 0.5 in scales and any(side % 2 for side in config.grid):
        raise ValueError(f"{config.grid[0]} x {config.grid[1]} patches cannot be halved; use an even number")


def is_detector(folder: Path) -> bool:
    """Return whether a folder's config.json is a detector's; False if there is none, or it cannot be read."""
    return {"backbone", "scales"} <= contract_fields(folder).keys()


def read_detector_contract(folder: Path) -> DetectorContract:
    """Read the contract of the detector in `folder`. Raises UserError, naming the file, if missing or invalid."""
    try:
        return DetectorContract.model_validate_json(read_contract_file(folder))
    except ValidationError as error:
        raise UserError(f"{folder / CONTRACT_FILE} is not the contract of a detector: {error}") from error
