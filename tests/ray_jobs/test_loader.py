"""The order of samples: a permutation, the same at any world size, from any step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_jobs.loader import batches, epoch_order, sample_positions


def global_batches(world: int, n: int = 100, batch: int = 24, start: int = 0, steps: int = 20) -> np.ndarray:
    """[steps, batch], the ranks' parts joined."""
    parts = [np.stack(list(batches(n, batch, rank, world, "f", 0, start, steps))) for rank in range(world)]
    return np.concatenate(parts, axis=1)


@given(st.integers(1, 300), st.integers(0, 2**40), st.integers(0, 1000))
def test_an_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    np.testing.assert_array_equal(np.sort(epoch_order("f", seed, epoch, n)), np.arange(n))


def test_order_depends_on_dataset_seed_and_epoch_alone() -> None:
    first = epoch_order("f", 0, 0, 1000)
    np.testing.assert_array_equal(epoch_order("f", 0, 0, 1000), first)
    for other in (epoch_order("g", 0, 0, 1000), epoch_order("f", 1, 0, 1000), epoch_order("f", 0, 1, 1000)):
        assert (other == first).mean() < 0.02
    # The order is part of what an artifact's key promises: a new number here needs a new VERSION of the stages.
    assert epoch_order("f", 0, 0, 10).tolist() == [4, 9, 0, 8, 1, 6, 3, 2, 7, 5]


@pytest.mark.parametrize("world", [2, 3, 4, 8, 24])
def test_global_batches_are_the_same_at_any_world_size(world: int) -> None:
    np.testing.assert_array_equal(global_batches(world), global_batches(1))


def test_ranks_see_disjoint_samples_that_cover_an_epoch_exactly_once() -> None:
    seen = global_batches(4, n=96, batch=24, steps=8)
    for epoch in (seen[:4], seen[4:]):
        np.testing.assert_array_equal(np.sort(epoch.ravel()), np.arange(96))


@given(st.integers(1, 60), st.sampled_from([1, 2, 4]), st.integers(0, 1000))
def test_starting_anywhere_continues_the_same_stream(n: int, world: int, start: int) -> None:
    stream = np.concatenate([epoch_order("f", 0, epoch, n) for epoch in range((start + 5) * 8 // n + 1)])
    resumed = global_batches(world, n=n, batch=8, start=start, steps=5)
    np.testing.assert_array_equal(resumed.ravel(), stream[start * 8 : (start + 5) * 8])


def test_positions_number_the_stream() -> None:
    joined = [sample_positions(step, 12, rank, 3) for step in range(4) for rank in range(3)]
    np.testing.assert_array_equal(np.concatenate(joined), np.arange(48))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"global_batch": 10, "world": 4}, "global batch 10 cannot be shared equally by 4 workers"),
        ({"rank": 2, "world": 2}, "rank 2 is not one of the 2 ranks"),
        ({"n": 0}, "n 0"),
        ({"start_step": -1}, "start_step -1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_at_once(sizes: dict[str, int], message: str) -> None:
    fitting = {"n": 9, "global_batch": 8, "rank": 0, "world": 1, "start_step": 0, "steps": 1}
    with pytest.raises(ValueError, match=message):
        batches(**{**fitting, **sizes}, fingerprint="f", seed=0)
