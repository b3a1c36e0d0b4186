"""The cost of a model on one machine, as cost.json of an evaluation or a fine-tuning has it; free of torch.

Times differ from run to run, so no key and no digest of a content covers the file. `ray_jobs.evaluation.measuring`
makes the numbers.
"""

from __future__ import annotations

from pathlib import Path

from vit_model.fields import Frozen

COST = "cost.json"


class Speed(Frozen):
    """The fastest of several passes of `images` images, whose pixels were already in memory."""

    images: int
    dtype: str
    images_per_second: float
    peak_bytes: int | None
    """Most memory that the model and these passes took: tensors on a GPU, on a CPU what the process grew by. None: the
    operating system does not say."""


class Cost(Frozen):
    """The content of cost.json. `forward` is without gradients; `training` is whole steps, without augmentation."""

    resolution: int
    parameters: int
    gflops: float
    """10^9 operations of one image's forward pass, two per MAC, by the architecture (`vit_model.compute`)."""
    device: str
    threads: int | None
    """The threads of a CPU; None on a GPU."""
    forward: Speed
    training: Speed | None = None


def write_cost(folder: Path, cost: Cost) -> None:
    """Write cost.json into a folder."""
    (folder / COST).write_text(cost.model_dump_json(indent=1) + "\n", "utf-8")
