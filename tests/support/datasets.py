"""Datasets for tests, from samples that a test makes: `datasets.put` writes them as ingest would."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from ray_jobs.data.columns import Sample
from ray_jobs.data.images import examine_pixels
from ray_jobs.data.samples import write_samples
from ray_jobs.data.shards import Dataset, DatasetInfo, ImageSize
from ray_jobs.data.writing import shuffle_key

put = write_samples


def identities(count: int) -> list[str]:
    """So many sample ids in the order in which a dataset numbers them."""
    return sorted((f"id{number:03d}" for number in range(count)), key=shuffle_key)


def raw(identity: str, pixels: np.ndarray, label: int) -> Sample:
    """A sample of pixels, uint8 [h, w, c]; its key is its identity."""
    facts = examine_pixels(pixels)
    return Sample(identity, identity, pixels.tobytes(), "raw", facts.width, facts.height, facts.channels, label)


def damage(dataset: Dataset, rows: Iterable[int]) -> None:
    """Flip a bit in the middle of each of these images of train."""
    index = dataset.index("train")
    for row in rows:
        path = dataset.folder / dataset.info.shards[index["shard"][row].as_py()].file
        content = bytearray(path.read_bytes())
        content[index["offset"][row].as_py() + index["length"][row].as_py() // 2] ^= 4
        path.write_bytes(content)


NUMBERED = np.random.default_rng(0).integers(0, 256, (200, 8, 8, 1), np.uint8)


def put_numbered(folder: Path, name: str, classes: Sequence[str], splits: Mapping[str, Iterable[int]]) -> DatasetInfo:
    """Write pictures of NUMBERED, even and odd ones in two classes; named after the dataset, as copies are known by
    their bytes."""
    samples = {
        split: [raw(f"{name}-{split}-{number:04d}", NUMBERED[number], number % 2) for number in numbers]
        for split, numbers in splits.items()
    }
    return put(folder, name, classes, ImageSize(height=8, width=8, channels=1), samples)


HALVES = ((slice(None), slice(0, 4)), (slice(None), slice(4, 8)), (slice(0, 4), slice(None)))


def put_noise(folder: Path, counts: Mapping[str, int], classes: Sequence[str] = ("a", "b", "c")) -> Path:
    """Write grey noise of 8x8, the classes in turn."""
    return _put_noise(folder, "noise", counts, classes, 255, 1)


def put_halves(folder: Path, counts: Mapping[str, int], classes: Sequence[str], channels: int = 1) -> Path:
    """Write dark noise of 8x8 with a bright half that says the class: left, right or top."""
    return _put_noise(folder, "halves", counts, classes, 64, channels)


def _put_noise(
    folder: Path, name: str, counts: Mapping[str, int], classes: Sequence[str], high: int, channels: int
) -> Path:
    rng = np.random.default_rng(0)
    splits: dict[str, list[Sample]] = {}
    for split, count in counts.items():
        splits[split] = samples = []
        for number in range(count):
            pixels, label = rng.integers(0, high, (8, 8, channels)).astype(np.uint8), number % len(classes)
            if name == "halves":
                pixels[HALVES[label]] += 150
            samples.append(raw(f"{split}/{number:04d}", pixels, label))
    put(folder, name, classes, ImageSize(height=8, width=8, channels=channels), splits)
    return folder
