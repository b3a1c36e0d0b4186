"""The recipe `continual` at its smallest, and the folders that it reads."""

from itertools import count
from pathlib import Path

import numpy as np
from PIL import Image

RNG = np.random.default_rng(0)
NUMBERS = count()


def add(folder: Path, each: int, wrong: bool = False) -> None:
    """Add images of noise whose brighter half says the class; `wrong`: in the other class's folder.

    Each appears whole, under its name, as rsync has it.
    """
    for number in range(2 * each):
        label = number % 2
        pixels = RNG.integers(0, 130, (32, 32, 3), np.uint8)
        pixels[16 * label : 16 * (label + 1)] += np.uint8(60)
        path = folder / "ab"[label ^ wrong] / f"{next(NUMBERS):06d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = folder.parent / path.name
        Image.fromarray(pixels).save(unfinished)
        unfinished.rename(path)


def small(photos: Path, frozen: Path, **more: object) -> list[str]:
    """Fill the frozen folder, and return the options that make the recipe small; `more`: further changes of `train`."""
    add(frozen / "train", 20)
    add(frozen / "test", 1000)
    train = {
        "steps": 100,
        "batch_size": 32,
        "model": "{patch_size: 8, width: 32, depth: 1, num_heads: 2, pooling: gap}",
        "workers": 1,
        "dtype": "float32",
        "learning_rate": 0.003,
    }
    changes = {f"train.{name}": value for name, value in (train | more).items()}
    changes |= {"photos.source.root": photos, "frozen.source.root": frozen, "few_shot.draws": 2}
    return [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
