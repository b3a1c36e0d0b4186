"""The cost of a model on one machine, stored in cost.json of an evaluation or a fine-tuning. Needs no torch.

Times differ from run to run, so keys and content digests do not cover the file. `ray_jobs.evaluation.measuring`
measures the numbers.
"""

from __future__ import annotations

from pathlib import Path

from vit_model.fields import Frozen

COST = "cost.json"


class Speed(Frozen):
    """The fastest of several passes over `images` images, with pixels already in memory."""

    images: int
    dtype: str
    images_per_second: float
    peak_bytes: int | None
    """Peak memory of the model and these passes: tensors on a GPU, growth of the process on a CPU. None: unknown to
    the operating system."""


class Cost(Frozen):
    """The content of cost.json. `forward` is without gradients; `training` is whole steps without augmentation."""

    resolution: int
    parameters: int
    gflops: float
    """10^9 operations in an image's forward pass, two per MAC, computed from the architecture (`vit_model.compute`)."""
    device: str
    threads: int | None
    """The number of CPU threads; None on a GPU."""
    forward: Speed
    training: Speed | None = None


def write_cost(folder: Path, cost: Cost) -> None:
    """Write cost.json into a folder."""
    (folder / COST).write_text(cost.model_dump_json(indent=1) + "\n", "utf-8")
