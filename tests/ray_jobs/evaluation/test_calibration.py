"""What probabilities are worth: against scikit-learn, plain Python, and a planted temperature."""

import numpy as np
import pytest
from scipy.special import softmax

from ray_jobs.evaluation.calibration import calibration_error, fit_temperature, is_identified

RNG = np.random.default_rng(0)


def test_a_planted_temperature_is_found() -> None:
    logits = RNG.normal(0, 2, (20_000, 5))
    labels = np.array([RNG.choice(5, p=row) for row in softmax(logits, axis=1)])
    assert fit_temperature(logits, labels) == pytest.approx(1, rel=0.03)
    assert fit_temperature(3 * logits, labels) == pytest.approx(3, rel=0.03), "three times too confident"


def test_where_all_are_right_the_temperature_has_a_limit() -> None:
    temperature = fit_temperature(np.eye(3, dtype=np.float32), np.arange(3))
    assert temperature == pytest.approx(0.05, rel=0.01)
    assert not is_identified(temperature, ())


@pytest.mark.parametrize(
    ("temperature", "accuracies", "is_known"),
    [(1.2, (0.9, 0.95), True), (0.05, (0.9,), False), (20.0, (0.1,), False), (0.6, (0.98, 1.0), False)],
)
def test_a_temperature_is_known_only_from_errors(
    temperature: float, accuracies: tuple[float, ...], is_known: bool
) -> None:
    """A fold without errors is at the bound and pulls the mean of the folds."""
    assert is_identified(temperature, accuracies) == is_known


def test_the_calibration_error_is_the_gap_in_each_bin() -> None:
    probabilities = np.append(RNG.uniform(0.2, 1, 500).astype(np.float32), np.float32([0, 1]))
    correct = RNG.random(502) < probabilities**2
    expected = 0.0
    for bin_ in range(15):
        own = [i for i, p in enumerate(probabilities) if bin_ / 15 <= p < (bin_ + 1) / 15 or (bin_ == 14 and p == 1)]
        if own:
            gap = np.mean(correct[own]) - np.mean(probabilities[own], dtype=np.float64)
            expected += len(own) / 502 * abs(gap)
    assert calibration_error(probabilities, correct) == pytest.approx(expected, abs=1e-9)
    assert calibration_error(np.full(10, 0.7), np.arange(10) < 7) == pytest.approx(0, abs=1e-12)
