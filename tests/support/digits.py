"""scikit-learn's digits, and what a frozen ViT's representations of them are worth to a linear classifier."""

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelines.files.sources import source_files
from pipelines.spec import DigitsSource
from vit_model.model import ViT

TRAIN = 1200  # the first of 1,797; the rest is by other writers and is there to test on


@cache
def ink() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """(counts of ink from 0 to 16 [1797, 64], labels), as scikit-learn's load_digits gives them."""
    [file] = source_files(DigitsSource(kind="digits")).values()
    table = np.loadtxt(file, delimiter=",")
    return table[:, :64], table[:, 64].astype(np.int64)


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


@torch.inference_mode()
def probe_accuracy(model: ViT, per_class: int = 10, draws: int = 5) -> float:
    """Mean accuracy on the other writers' digits of logistic regression on `per_class` labelled images a class."""
    from sklearn.linear_model import LogisticRegression

    pixels, labels = digits()
    features = model.eval().forward_features(as_input(pixels))[1].numpy()
    found = []
    for draw in range(draws):
        rng = np.random.default_rng(draw)
        support = np.concatenate(
            [
                rng.choice(np.flatnonzero(labels[:TRAIN] == label), per_class, replace=False)
                for label in range(10)
            ]
        )
        mean, std = features[support].mean(axis=0), features[support].std(axis=0) + 1e-6
        scaled = (features - mean) / std
        classifier = LogisticRegression(C=0.1, max_iter=500).fit(scaled[support], labels[support])
        found.append(classifier.score(scaled[TRAIN:], labels[TRAIN:]))
    return float(np.mean(found))
