"""Linear segmentation: least squares from patch tokens to the classes of pixels, in closed form.

Every pixel with a class is one example: its input is the token of its patch, its target is one-hot. So an image counts
by the area that has a class, and only sums over tokens (`Moments`) have to be in memory. For predictions, the scores of
the tokens are resized to the mask, bilinearly, and the largest score wins.

If one class covers most pixels, least squares predicts it everywhere. So a pixel's weight is its class's frequency to
the power of -`balance`: 0 weights pixels equally, 1 weights classes equally.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from ray_jobs.data.masks import IGNORED, Mask

# L2 per example, not for the sum, which grows with the number of patches. Inputs have variance 1.
L2_GRID = tuple(10.0**exponent for exponent in range(-6, 2))
BALANCES = (0.0, 0.5, 1.0)
VARIANTS = tuple((balance, l2) for balance in BALANCES for l2 in L2_GRID)
"""The variants of the fit; one is chosen on dev."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Moments:
    """Sums over tokens [d] for each class, weighted by the class's share of the token's patch."""

    areas: Floats
    """[k]"""
    inputs: Floats
    """[k, d]"""
    gram: Floats
    """[k, d, d]"""

    @classmethod
    def of(cls, tokens: NDArray[np.floating], shares: Floats) -> Moments:
        """Sum over tokens [n, d], given the share of each class in their patches [n, k]."""
        x = np.asarray(tokens, np.float64)
        grams = []
        for share in shares.T:
            present = x[share > 0]
            grams.append((present * share[share > 0, None]).T @ present)
        return cls(shares.sum(axis=0), shares.T @ x, np.stack(grams))

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.areas + other.areas, self.inputs + other.inputs, self.gram + other.gram)

    def fit(self, variants: Sequence[tuple[float, float]]) -> Floats:
        """Return weights [variants, d + 1, k] for unscaled tokens, the intercept last.

        The fit standardises tokens and does not penalise the intercept.

        Args:
            variants: (balance, L2) pairs.
        """
        by_balance = {balance: self._path(balance) for balance, _ in variants}
        return np.stack([by_balance[balance].weights(l2) for balance, l2 in variants])

    def _path(self, balance: float) -> _Path:
        present = self.areas > 0
        weights = np.zeros_like(self.areas)
        weights[present] = (self.areas[present] / self.areas.sum()) ** -balance
        weights /= weights @ self.areas
        shares, mean = weights * self.areas, weights @ self.inputs
        covariance = np.tensordot(weights, self.gram, 1) - np.outer(mean, mean)
        deviation = np.sqrt(np.diag(covariance).clip(min=0)) + 1e-5
        eigenvalues, vectors = np.linalg.eigh(covariance / np.outer(deviation, deviation))
        cross = weights * self.inputs.T - np.outer(mean, shares)
        projected = vectors.T @ (cross / deviation[:, None])
        return _Path(shares, mean, deviation, eigenvalues.clip(min=0), vectors, projected)


class _Path(NamedTuple):
    """The solution at any L2, from one eigendecomposition of the inputs' correlations."""

    shares: Floats
    mean: Floats
    deviation: Floats
    eigenvalues: Floats
    vectors: Floats
    projected: Floats

    def weights(self, l2: float) -> Floats:
        """Return slopes and then intercepts, [d + 1, k]."""
        solution = self.vectors @ (self.projected / (self.eigenvalues + l2)[:, None])
        slopes = solution / self.deviation[:, None]
        return np.vstack([slopes, self.shares - self.mean @ slopes])


def shares_of_patches(mask: Mask, grid: tuple[int, int], num_classes: int) -> Floats:
    """Return the share of each class in the area of each patch [rows * columns, classes].

    The grid covers the whole mask; a pixel on the edge of two patches is divided between both.
    """
    rows, columns = (_overlaps(size, parts) for size, parts in zip(mask.shape, grid, strict=True))
    shares = [rows @ (mask == number) @ columns.T for number in range(num_classes)]
    return np.stack(shares, axis=-1).reshape(-1, num_classes)


def _overlaps(size: int, parts: int) -> Floats:
    """Divide a line of `size` pixels into equal parts; return each pixel's share of each part, [parts, size]."""
    edges, pixels = np.linspace(0, size, parts + 1), np.arange(size)
    inside = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return np.asarray(inside.clip(min=0) * (parts / size))


def confusion(scores: NDArray[np.floating], mask: Mask) -> NDArray[np.int64]:
    """Return how many pixels of each class have each prediction, [variants, classes, classes].

    Args:
        scores: [variants, rows, columns, classes], the scores of the patches.
    """
    classes = scores.shape[-1]
    small = torch.from_numpy(np.ascontiguousarray(np.moveaxis(scores, -1, 1), np.float32))
    large = functional.interpolate(small, size=mask.shape, mode="bilinear", align_corners=False)
    predictions = large.argmax(dim=1).numpy()
    known = mask != IGNORED
    labels = mask[known].astype(np.int64)
    counts = [
        np.bincount(labels * classes + predicted[known], minlength=classes**2).reshape(classes, classes)
        for predicted in predictions
    ]
    return np.stack(counts).astype(np.int64)
