"""An exact search for all pairs of 64-bit hashes that differ in a few bits.

If two hashes differ in at most r bits, they agree in at least m - r of m blocks of bits. The search sorts the hashes
C(m, r) times, each time by a different choice of m - r blocks, and compares only hashes that agree in these blocks
(Manku et al., "Detecting near-duplicates for web crawling", 2007). It misses no pair. m minimises the time of sorting
and comparing.

    10^8 hashes, r = 4: m = 6, 15 sorts by 21 bits. A sort takes 10^8 x 27 x about 8 ns = 22 s, its
    comparisons (10^8)^2 / 2 / 2^21.3 = 1.9 x 10^9 x 5 ns = 10 s: 8 minutes of one core, and 8 GB of memory (hashes,
    order, sorted hashes, masked hashes: 8 bytes each, and as much again for numpy's temporaries).
    Comparing all pairs: 5 x 10^15 comparisons, 290 days.
    10^8 images of at least 32 pixels per side need two searches (`ray_jobs.ingesting.copies`): 4 x 10^8 hashes with
    the mirrored and rotated views, and 4 to 5 x 10^8 with the cropped ones. m = 7, 35 sorts of 100 s each: 2 hours of
    one core and 35 GB.

Measured on random hashes (a busy core of an AMD EPYC, r = 4): 10^6 in 1.3 s, 10^7 in 31 s of CPU time and 0.8 GB.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

_BITS = 64
Hashes = NDArray[np.uint64]
Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]


def near_pairs(hashes: Hashes, distance: int) -> Pairs:
    """Return (i, j), i < j, of all pairs of `hashes` [n] that differ in at most `distance` bits.

    The hashes must be distinct.
    """
    pairs = [np.zeros((0, 2), np.int64)]
    for mask in _masks(len(hashes), distance) if distance else ():
        order = np.argsort(hashes & mask)
        ordered = hashes[order]
        agree = ordered & mask
        left, step = np.arange(len(hashes)), 0
        while len(left):  # hashes that agree are neighbours: compare each with the next, then the one after it, ...
            step += 1
            left = left[left + step < len(hashes)]
            left = left[agree[left] == agree[left + step]]
            close = left[np.bitwise_count(ordered[left] ^ ordered[left + step]) <= distance]
            pairs.append(np.sort(np.stack([order[close], order[close + step]], axis=1), axis=1))
    distinct = np.unique(np.concatenate(pairs), axis=0)
    return distinct[:, 0], distinct[:, 1]


def is_near(hashes: Hashes, others: Hashes, distance: int) -> NDArray[np.bool_]:
    """Return whether each of `hashes` [n] differs from one of `others` [m] in at most `distance` bits."""
    near = np.isin(hashes, others)
    for mask in _masks(len(others), distance) if distance else ():
        ordered = others[np.argsort(others & mask)]
        agree = ordered & mask
        left = np.flatnonzero(~near)
        place = np.searchsorted(agree, hashes[left] & mask)
        while len(left):  # compare each with the first that agrees, then the next, ...
            in_range = place < len(agree)
            left, place = left[in_range], place[in_range]
            agrees = agree[place] == hashes[left] & mask
            left, place = left[agrees], place[agrees]
            close = np.bitwise_count(ordered[place] ^ hashes[left]) <= distance
            near[left[close]] = True
            left, place = left[~close], place[~close] + 1
    return near


def _masks(count: int, distance: int) -> Iterator[np.uint64]:
    """Yield masks: any two hashes that differ in at most `distance` bits agree in the bits of at least one mask."""

    def cost(blocks: int) -> float:
        compared = count / 2 / 2 ** (_BITS * (blocks - distance) / blocks)
        return math.comb(blocks, distance) * (math.log2(max(count, 2)) + compared)

    blocks = min(range(distance + 1, distance + 6), key=cost)
    bounds = [_BITS * number // blocks for number in range(blocks + 1)]
    whole = [sum(1 << bit for bit in range(bounds[number], bounds[number + 1])) for number in range(blocks)]
    for chosen in combinations(whole, blocks - distance):
        yield np.uint64(sum(chosen))
