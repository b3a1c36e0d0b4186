"""Random numbers of samples and steps: pure functions of a seed, a purpose and a position in the training stream.

They are drawn on the CPU for images on any device. The numbers of samples are the same at any rank, worker count and
thread count and after a restart; the numbers of a step (dropout) depend on the rank.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray

from ray_jobs.randomness import GOLDEN, splitmix64
from vit_model.config import Architecture, ViTConfig


def uniform(seed: int, positions: NDArray[np.int64], draws: int = 8, purpose: str = "augment") -> NDArray[np.float64]:
    """Return numbers in [0, 1), [n, draws]; row i is a pure function of seed, purpose, draws and positions[i].

    The generator is SplitMix64.
    """
    key = np.uint64(int.from_bytes(hashlib.sha256(f"{purpose}/{seed}".encode()).digest()[:8]))
    counter = positions.astype(np.uint64)[:, None] * np.uint64(draws) + np.arange(draws, dtype=np.uint64)
    outputs = splitmix64(np.asarray(key + counter * GOLDEN, np.uint64))
    return np.asarray(outputs >> np.uint64(11), np.float64) / 2.0**53


def drop_path_draws(
    architecture: Architecture, seed: int, positions: NDArray[np.int64], device: torch.device, views: int = 1
) -> tuple[torch.Tensor, ...]:
    """Return the draws of stochastic depth (`ViT.drop_path_factors`), for each view of the samples.

    They are float64 [n, blocks, 2], and the last inputs of the trained module. Returns () for an architecture without
    stochastic depth.
    """
    if not isinstance(architecture, ViTConfig) or not architecture.stochastic_depth:
        return ()
    blocks = architecture.num_blocks
    draws = uniform(seed, positions, views * blocks * 2, "stochastic depth")
    return torch.from_numpy(draws).to(device).view(-1, views, blocks, 2).unbind(1)


def dropout_seed(seed: int, step: int, rank: int = 0) -> int:
    """Return the seed of a worker's torch generator for a step, which draws dropout.

    It is set before every step, so a training that resumes at a step draws the same numbers as one that ran through.
    """
    digest = hashlib.sha256(f"dropout/{seed}/{step}/{rank}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1  # torch takes 63 bits
