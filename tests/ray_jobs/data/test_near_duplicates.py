"""Near hashes: every pair within the distance, and no other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_jobs.data.near_duplicates import _masks, is_near, near_pairs

WORD = st.integers(0, 2**64 - 1)


def by_brute_force(hashes: np.ndarray, distance: int) -> set[tuple[int, int]]:
    close = np.bitwise_count(hashes[:, None] ^ hashes[None]) <= distance
    return {(i, j) for i, j in np.argwhere(close).tolist() if i < j}


def as_set(hashes: np.ndarray, distance: int) -> set[tuple[int, int]]:
    first, second = near_pairs(hashes, distance)
    pairs = list(zip(first.tolist(), second.tolist(), strict=True))
    assert len(pairs) == len(set(pairs)), "a pair is told once"
    return set(pairs)


@given(
    st.lists(WORD, min_size=1, max_size=4),
    st.lists(st.sets(st.integers(0, 63), max_size=9), max_size=20),
    st.integers(0, 8),
)
def test_all_pairs_and_no_others(centres: list[int], changes: list[set[int]], distance: int) -> None:
    """Hashes around few centres, so that there are pairs at every distance."""
    near = [centres[n % len(centres)] ^ sum(1 << bit for bit in bits) for n, bits in enumerate(changes)]
    hashes = np.unique(np.array([*centres, *near], np.uint64))
    assert as_set(hashes, distance) == by_brute_force(hashes, distance)


@given(
    st.lists(WORD, min_size=1, max_size=3),
    st.lists(st.sets(st.integers(0, 63), max_size=9), max_size=20),
    st.integers(0, 8),
)
def test_what_is_near_one_of_many(centres: list[int], changes: list[set[int]], distance: int) -> None:
    """Both sides around the same centres, some of them in both and some twice."""
    near = [centres[n % len(centres)] ^ sum(1 << bit for bit in bits) for n, bits in enumerate(changes)]
    hashes = np.array([*centres, *near[::2], *near[:3]], np.uint64)
    others = np.array([*near[1::2], *near[:1] * 2], np.uint64)
    expected = (np.bitwise_count(hashes[:, None] ^ others[None]) <= distance).any(axis=1)
    np.testing.assert_array_equal(is_near(hashes, others, distance), expected)


@pytest.mark.parametrize("distance", [1, 4, 8])
def test_many_hashes_that_crowd(distance: int) -> None:
    rng = np.random.default_rng(0)
    hashes = np.unique(rng.integers(0, 2**64, 500, np.uint64) & np.uint64(0x0101_0303_0707_1F1F))
    assert as_set(hashes, distance) == by_brute_force(hashes, distance)
    some, others = hashes[::5], np.setdiff1d(hashes, hashes[::5])[::2]
    expected = (np.bitwise_count(some[:, None] ^ others[None]) <= distance).any(axis=1)
    np.testing.assert_array_equal(is_near(some, others, distance), expected)
    assert 0 < expected.sum() < len(some) or distance == 8


@given(st.sets(st.integers(0, 63), max_size=8), st.sampled_from([10, 10**4, 10**6, 10**9]))
def test_any_changed_bits_leave_one_mask_untouched(bits: set[int], count: int) -> None:
    changed = np.uint64(sum(1 << bit for bit in bits))
    assert any(mask & changed == 0 for mask in _masks(count, max(1, len(bits))))
