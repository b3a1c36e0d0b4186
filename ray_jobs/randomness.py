"""Independent random numbers from one seed: a list of purposes, and a hash.

Two uses of the same seed draw different numbers because each adds its purpose to the seed. Needs numpy only.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""The step between two states of SplitMix64."""


class Purpose(IntEnum):
    """What a seed is used for. The numbers are part of every result, so they never change.

    Some purposes share a number; a test forbids this for new ones.
    """

    DRAW_LABELS = 1
    KEEP_LABELS = 2
    SELECT_L2 = 3
    DIVIDE_TIES = 4
    DIVIDE_PIXEL_TIES = 5
    DRAW_POINTS = 1
    PROPOSE_POINT = 3
    CONTACT_SHEET = 3
    AUDIT_FOLDS = 4
    CLUSTERS = 6
    INSPECT = 7
    GLYPHS = 0x676C7970  # "glyp"; the module of a source has its own copy, because the source's fingerprint covers it
    SHAPES = 0x73686170  # "shap"


def splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the outputs of SplitMix64 for these states, which are 64-bit hashes of the states."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(state ^ (state >> np.uint64(31)), np.uint64)
