"""What must be right of a loader: an epoch has each image once, and damage is noticed.

Ours must also resume exactly, and make the same global batches with any number of ranks.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from loading.arms import BATCH, Arm, Batches, numbered, open_loader, ours
from loading.data import DAMAGES, damaged_folder

if TYPE_CHECKING:
    from ray_jobs.data.loader import Loader

COLUMNS = {
    "once": "each image once per epoch",
    "flipped": "a flipped bit",
    "truncated": "a truncated JPEG",
    "worlds": "same batches at world 1, 2, 4",
    "resume": "resume: same rest",
    "resume_seconds": "time to resume",
}


def gates(arm: Arm, folder: Path, images: int) -> dict[str, str]:
    """Try an arm on a set and its damaged copies: column -> what came of it."""
    numbers = epoch(arm.batches(folder, 2), images)
    is_complete = sorted(numbers[:images]) == list(range(images))
    found = {"once": "pass" if is_complete else "fail"}
    for damage in DAMAGES:
        try:
            found[damage] = damaged_epoch(arm, damaged_folder(folder, damage), images)
        except Exception as error:  # a peer may raise anything
            found[damage] = f"stops: {type(error).__name__}"
    return found | (exactness(folder) if arm.batches is ours else {})


def epoch(batches: Batches, images: int) -> list[int]:
    """The numbers of the images in as many batches as one epoch needs."""
    numbers: list[int] = []
    while len(numbers) < images:
        numbers += next(batches)[0]
    return numbers


def damaged_epoch(arm: Arm, folder: Path, images: int) -> str:
    if arm.batches is not ours:
        epoch(arm.batches(folder, 2), images)
        return "fail: not noticed"
    with open_loader(folder, threads=2) as loader:
        epoch(numbered(loader), images)
        replaced = loader.substitutes
    return f"pass: {replaced} replaced, counted, told" if replaced else "fail: not noticed"


def exactness(folder: Path) -> dict[str, str]:
    """Whether our batches are the same at any world size and after a resume, and how long a resume takes."""

    def loader(samples: int, **sampling: int) -> Loader:
        opened = open_loader(folder, threads=2, **sampling)
        opened.load_state_dict(opened.state_dict() | {"samples": samples})
        return opened

    def digests(samples: int = 0, world: int = 1, steps: int = 4) -> list[int]:
        """Of each global batch."""
        ranks = [loader(samples, batch_size=64, rank=rank, world=world) for rank in range(world)]
        found = [
            xxhash.xxh3_64_intdigest(b"".join(next(rank).images.numpy().tobytes() for rank in ranks))
            for _ in range(steps)
        ]
        for rank in ranks:
            rank.__exit__()
        return found

    whole = digests()
    is_same_split = all(digests(world=world) == whole for world in (2, 4))
    is_same_rest = digests(samples=128, steps=2) == whole[2:]
    began = time.perf_counter()
    with loader(10**12 + 64, batch_size=BATCH) as resumed:
        seconds = time.perf_counter() - began
        next(resumed)
        first = time.perf_counter() - began
    return {
        "worlds": "pass" if is_same_split else "fail",
        "resume": "pass" if is_same_rest else "fail",
        "resume_seconds": f"{seconds * 1000:.0f} ms, its first batch after {first:.2f} s",
    }
