"""Intervals: their coverage on simulated draws and images, and what pairing gains."""

import numpy as np
import pytest
from scipy import stats

from ray_jobs.intervals import accuracy_interval, paired_difference


def simulate(rng: np.random.Generator, draws: int, images: int) -> np.ndarray:
    """Correctness [draws, images] where both draws and images differ in difficulty."""
    logits = 1.0 + 0.6 * rng.normal(size=(draws, 1)) + 1.5 * rng.normal(size=images)
    return np.asarray(rng.random((draws, images)) < 1 / (1 + np.exp(-logits)))


def true_accuracy() -> float:
    normal = np.random.default_rng(0).normal(scale=np.hypot(0.6, 1.5), size=1_000_000)
    return float(np.mean(1 / (1 + np.exp(-1.0 - normal))))


def test_about_95_percent_of_intervals_hold_the_true_accuracy() -> None:
    truth, rng = true_accuracy(), np.random.default_rng(1)
    held = 0
    for _ in range(300):
        interval = accuracy_interval(simulate(rng, 20, 120), replicates=400)
        held += interval.low <= truth <= interval.high
    # 300 trials at .95: standard deviation .013
    assert 0.90 < held / 300 <= 0.99


def test_resampling_images_alone_would_miss_the_draws() -> None:
    correct = simulate(np.random.default_rng(2), 20, 2000)
    interval = accuracy_interval(correct)
    binomial = 2 * 1.96 * np.sqrt(correct.mean() * (1 - correct.mean()) / correct.size)
    assert interval.high - interval.low > 3 * binomial


def test_one_draw_gives_the_binomial_interval() -> None:
    correct = np.arange(5000)[None] < 4000
    interval = accuracy_interval(correct, replicates=8000)
    assert interval.value == 0.8
    # The 95 % interval is .0111 to either side, a 90 % interval would be .0093.
    wilson = stats.binomtest(4000, 5000).proportion_ci(0.95, method="wilson")
    assert interval.low == pytest.approx(wilson.low, abs=0.0008)
    assert interval.high == pytest.approx(wilson.high, abs=0.0008)


def test_it_is_the_bootstrap_that_resamples_every_image() -> None:
    rng = np.random.default_rng(4)
    correct = simulate(rng, 3, 150)
    means = [correct[rng.integers(3, size=3)][:, rng.integers(150, size=150)].mean() for _ in range(20_000)]
    interval = accuracy_interval(correct, replicates=20_000)
    assert (interval.low, interval.high) == pytest.approx(np.quantile(means, (0.025, 0.975)), abs=0.003)


def test_pairing_narrows_the_interval_of_a_difference() -> None:
    rng = np.random.default_rng(3)
    difficulty = 1.5 * rng.normal(size=400) + 0.6 * rng.normal(size=(20, 1))
    b = difficulty + rng.logistic(size=(20, 400)) * 0.2 > 0
    a = difficulty + 0.2 + rng.logistic(size=(20, 400)) * 0.2 > 0
    paired = paired_difference(a, b)
    one, other = accuracy_interval(a), accuracy_interval(b)
    unpaired = np.hypot(one.high - one.low, other.high - other.low)
    assert paired.high - paired.low < 0.5 * unpaired
    assert 0 < paired.low < paired.value < paired.high
    assert paired.value == pytest.approx(one.value - other.value)


def test_a_difference_changes_sign_with_its_order_and_is_nought_with_itself() -> None:
    a, b = (simulate(np.random.default_rng(seed), 5, 100) for seed in (0, 1))
    forward, backward = paired_difference(a, b), paired_difference(b, a)
    assert forward == pytest.approx((-backward.value, -backward.high, -backward.low))
    assert paired_difference(a, a) == (0.0, 0.0, 0.0)


def test_intervals_repeat_and_follow_the_seed_in_their_last_digits_only() -> None:
    correct = simulate(np.random.default_rng(0), 10, 300)
    first, same, other = (accuracy_interval(correct, seed=seed) for seed in (0, 0, 1))
    assert first == same != other
    assert first == pytest.approx(other, abs=0.01)


def test_chunks_change_nothing_but_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = simulate(np.random.default_rng(0), 10, 300)
    whole = accuracy_interval(correct)
    monkeypatch.setattr("ray_jobs.intervals._CHUNK_VALUES", 700)
    assert accuracy_interval(correct) == whole


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: accuracy_interval(np.ones(5)), r"shape \(5,\)"),
        (lambda: accuracy_interval(np.ones((0, 5))), "at least 1"),
        (lambda: accuracy_interval(np.full((2, 5), 0.5)), "other than 0 and 1"),
        (lambda: accuracy_interval(np.ones((2, 5)), replicates=10), "replicates is 10"),
        (lambda: paired_difference(np.ones((2, 5)), np.ones((3, 5))), "same draws"),
    ],
)
def test_wrong_input_is_named(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()
