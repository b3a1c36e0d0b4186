"""scikit-learn's digits."""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pipelines.files.sources import source_files
from pipelines.spec import DigitsSource
from ray_jobs.data.shards import ImageSize
from tests.support import datasets


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


def as_input(pixels: Tensor) -> Tensor:
    """uint8 [b, height, width, c] -> float32 [b, c, height, width] from -1 to 1."""
    return (pixels.permute(0, 3, 1, 2).float() / 127.5 - 1).contiguous()
