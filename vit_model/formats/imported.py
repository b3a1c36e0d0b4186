"""The result of reading a foreign checkpoint."""

from typing import Literal, NamedTuple

from torch import Tensor

from vit_model.config import Architecture
from vit_model.contract import Preprocessing


class Imported(NamedTuple):
    """A foreign checkpoint converted to our names and types."""

    architecture: Architecture
    weights: dict[str, Tensor]
    """The architecture's tensors by our names, float32, none missing and none extra."""
    preprocessing: Preprocessing | None
    """None if the file does not state it."""
    class_names: tuple[str, ...]
    """Empty without a classifier; "0", "1", ... if the file has no names."""
    license: str | None
    lines: tuple[str, ...]
    """What was imported, resized, dropped or newly initialised; one sentence each."""
    training_data: str = "unknown"
    """As in a `ModelContract`, like `problem_type` and `thresholds`."""
    problem_type: Literal["single_label_classification", "multi_label_classification"] = "single_label_classification"
    thresholds: tuple[float, ...] = ()
