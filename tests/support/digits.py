"""scikit-learn's digits, and a short training on them."""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelines.files.sources import source_files
from pipelines.spec import DigitsSource
from ray_jobs.data.shards import ImageSize
from tests.support import datasets

TRAIN = 1200  # the first of 1,797; the rest is by other writers and is there to test on


@cache
def ink() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """(counts of ink from 0 to 16 [1797, 64], labels), as scikit-learn's load_digits gives them."""
    [file] = source_files(DigitsSource(kind="digits")).values()
    table = np.loadtxt(file, delimiter=",")
    return table[:, :64], table[:, 64].astype(np.int64)


@cache
def grey() -> NDArray[np.uint8]:
    """Their pixels [1797, 8, 8, 1], at most 240."""
    return (ink()[0] * 15).astype(np.uint8).reshape(-1, 8, 8, 1)


def put_digits(folder: Path, name: str, parts: Mapping[str, Iterable[int]], notes: tuple[str, ...] = ()) -> None:
    """Write the digits of these numbers as a dataset; ids are in the order of the numbers."""
    pixels, labels = grey(), ink()[1]
    ids = datasets.identities(len(pixels))
    samples = {
        split: [datasets.raw(ids[number], pixels[number], int(labels[number])) for number in numbers]
        for split, numbers in parts.items()
    }
    size = ImageSize(height=8, width=8, channels=1)
    datasets.put(folder, name, list("0123456789"), size, samples, notes=notes)


def digits() -> tuple[Tensor, NDArray[np.int64]]:
    """(uint8 [1797, 8, 8, 1], labels)."""
    counts, labels = ink()
    return torch.from_numpy((counts * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)), labels


def as_input(pixels: Tensor) -> Tensor:
    """uint8 [b, height, width, c] -> float32 [b, c, height, width] from -1 to 1."""
    return (pixels.permute(0, 3, 1, 2).float() / 127.5 - 1).contiguous()


def pretrain(task: torch.nn.Module, steps: int, draws: tuple[int, ...]) -> list[float]:
    """Train a task on digits, with a rate that rises over 40 steps and falls to 0; return the losses.

    `task` takes images, their pixels and random numbers, of this shape for an image.
    """
    generator = torch.Generator().manual_seed(0)
    pixels, _ = digits()
    optimizer = torch.optim.AdamW(task.parameters(), weight_decay=0.05)
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1, (step + 1) / 40) * (1 - step / steps)
        chosen = pixels[torch.randint(0, TRAIN, (64,), generator=generator)]
        drawn = torch.rand(64, *draws, generator=generator, dtype=torch.float64)
        loss = task(as_input(chosen), chosen, drawn)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(task.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses
