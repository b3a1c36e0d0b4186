"""The order of samples: permutations, the same at any world size, from any step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_jobs.data.sampler import (
    BalancedOrder,
    GlobalOrder,
    WindowOrder,
    permute,
    sample_positions,
)


def global_batches(world: int, n: int = 100, batch: int = 24, start: int = 0, steps: int = 20) -> np.ndarray:
    """[steps, batch], the ranks' parts joined."""
    order = GlobalOrder(n, "f", 0)
    ranks = [[sample_positions(start + s, batch, rank, world) for s in range(steps)] for rank in range(world)]
    return np.concatenate([[order.rows(positions) for positions in rank] for rank in ranks], axis=1)


@given(st.integers(1, 300), st.integers(0, 2**40), st.integers(0, 1000))
def test_an_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    rows = GlobalOrder(n, "f", seed).rows(np.arange(epoch * n, (epoch + 1) * n))
    np.testing.assert_array_equal(np.sort(rows), np.arange(n))


def test_order_depends_on_dataset_seed_and_epoch_alone() -> None:
    positions = np.arange(1000)
    first = GlobalOrder(1000, "f", 0).rows(positions)
    np.testing.assert_array_equal(GlobalOrder(1000, "f", 0).rows(positions), first)
    for other in (
        GlobalOrder(1000, "g", 0).rows(positions),
        GlobalOrder(1000, "f", 1).rows(positions),
        GlobalOrder(1000, "f", 0).rows(positions + 1000),
    ):
        assert (other == first).mean() < 0.02
    # The order is part of what an artifact's key promises: new numbers here need new VERSIONs of the stages.
    assert GlobalOrder(10, "f", 0).rows(np.arange(10)).tolist() == PINNED
    assert WindowOrder(np.arange(10) // 2, "f", 0, 4).rows(np.arange(10)).tolist() == PINNED_WINDOW


PINNED = [0, 7, 2, 1, 9, 5, 3, 6, 8, 4]
PINNED_WINDOW = [5, 7, 9, 0, 4, 6, 8, 1, 2, 3]


@pytest.mark.parametrize("n", [6, 17, 101])
def test_every_place_and_every_neighbour_is_equally_likely(n: int) -> None:
    """Chi-squared over 4,000 epochs, within six standard deviations."""
    epochs = 4000
    rows = GlobalOrder(n, "f", 3).rows(np.arange(n * epochs)).reshape(epochs, n)
    places = np.stack([np.bincount(rows[:, place], minlength=n) for place in range(n)])
    follows = np.bincount(((rows[:, 1:] - rows[:, :-1]) % n).ravel(), minlength=n)[1:]
    for counts, freedom in ((places, (n - 1) ** 2), (follows, n - 2)):
        mean = counts.mean()
        assert abs(((counts - mean) ** 2 / mean).sum() - freedom) < 6 * np.sqrt(2 * freedom) + 1


def test_permutations_of_several_sizes_at_once_are_those_alone() -> None:
    keys = np.array([1, 2**63, 7], np.uint64)
    sizes = [1, 17, 1000]
    together = permute(np.array([0, 16, 999]), np.array(sizes), keys)
    alone = [permute([n - 1], [n], keys[i : i + 1])[0] for i, n in enumerate(sizes)]
    assert together.tolist() == alone


@pytest.mark.parametrize("world", [2, 3, 4, 8, 24])
def test_global_batches_are_the_same_at_any_world_size(world: int) -> None:
    np.testing.assert_array_equal(global_batches(world), global_batches(1))


def test_epochs_follow_each_other_without_gap_or_double() -> None:
    stream = global_batches(1, n=7, batch=5, steps=14).ravel()  # ten epochs of seven
    for epoch in stream.reshape(10, 7):
        assert sorted(epoch) == list(range(7))


def test_any_position_costs_the_same() -> None:
    far = 10**15
    np.testing.assert_array_equal(
        GlobalOrder(10**9, "f", 0).rows(np.arange(far, far + 5)),
        GlobalOrder(10**9, "f", 0).rows(np.arange(far - 100, far + 5))[100:],
    )


@pytest.mark.slow
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=200),
    st.integers(1, 70),
    st.integers(0, 5),
)
def test_windows_are_permutations_from_any_position(groups: list[int], batch: int, epoch: int) -> None:
    n = len(groups)
    order = WindowOrder(np.array(groups), "f", 0, batch)
    positions = np.arange(epoch * n, (epoch + 2) * n)
    rows = order.rows(positions)
    for each in rows.reshape(2, n):
        np.testing.assert_array_equal(np.sort(each), np.arange(n))
    np.testing.assert_array_equal(order.rows(positions[n // 2 : n + 1]), rows[n // 2 : n + 1])


def test_windows_read_few_row_groups_at_a_time_and_ranks_different_ones() -> None:
    groups = np.repeat(np.arange(1280), 50)
    order = WindowOrder(groups, "f", 0, 128)
    epoch = order.rows(np.arange(len(groups))).reshape(-1, 128)
    half = [set(groups[part].ravel().tolist()) for part in (epoch[:, :64], epoch[:, 64:])]
    assert len(half[0] & half[1]) <= 1 + len(epoch[0]) // 64, "each of two ranks reads half of the row groups"
    last = {group: step for step, rows in enumerate(epoch) for group in groups[rows].tolist()}
    first = {group: len(epoch) - step for step, rows in enumerate(epoch[::-1]) for group in groups[rows].tolist()}
    spans = np.array([last[group] - first[group] + 1 for group in last])
    # 64 streams of two images a step: a window of 4 row groups lasts 100 steps.
    assert spans.max() <= 201 and np.median(spans) <= 100
    assert np.corrcoef(epoch.ravel(), np.arange(len(groups)))[0, 1] < 0.05, "row groups are permuted"


def test_a_balanced_order_has_every_class_equally_often_and_permutations_of_its_rows() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1, 3], [3, 40, 7]))
    order = BalancedOrder(labels, "f", 0)
    rows = order.rows(np.arange(3 * 120))
    for turn in labels[rows].reshape(-1, 3):
        assert sorted(turn) == [0, 1, 3]
    for label, size in {0: 3, 1: 40, 3: 7}.items():
        epochs = rows[labels[rows] == label][: 120 // size * size].reshape(-1, size)
        for epoch in epochs:
            assert sorted(epoch) == np.flatnonzero(labels == label).tolist()
        assert len({tuple(epoch) for epoch in epochs}) > 1
    assert len({tuple(turn) for turn in labels[rows].reshape(-1, 3)}) == 6, "classes are in any order"
    np.testing.assert_array_equal(order.rows(np.arange(100, 120)), rows[100:120])
