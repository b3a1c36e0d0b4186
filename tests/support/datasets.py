"""Datasets for tests, from samples that a test makes: `datasets.put` writes them as ingest would."""

import numpy as np

from ray_jobs.data.columns import Sample
from ray_jobs.data.images import examine_pixels
from ray_jobs.data.samples import write_samples
from ray_jobs.data.writing import shuffle_key

put = write_samples


def identities(count: int) -> list[str]:
    """So many sample ids in the order in which a dataset numbers them."""
    return sorted((f"id{number:03d}" for number in range(count)), key=shuffle_key)


def raw(identity: str, pixels: np.ndarray, label: int) -> Sample:
    """A sample of pixels, uint8 [h, w, c]; its key is its identity."""
    facts = examine_pixels(pixels)
    return Sample(
        identity, identity, pixels.tobytes(), "raw", facts.width, facts.height, facts.channels, label
    )
