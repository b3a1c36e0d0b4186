"""Weights of others, in our terms."""

from typing import NamedTuple

from torch import Tensor

from vit_model.config import Preprocessing, ViTConfig


class Imported(NamedTuple):
    """A foreign checkpoint in our terms."""

    architecture: ViTConfig
    weights: dict[str, Tensor]
    """By our names, float32, exactly the architecture's."""
    preprocessing: Preprocessing | None
    """None: the file does not say."""
    class_names: tuple[str, ...]
    """() where there is no head; "0", "1", ... where names are not said."""
    license: str | None
    lines: tuple[str, ...]
    """What was taken, resized, dropped, newly initialised; one sentence each."""
