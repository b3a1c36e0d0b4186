"""What a plot draws, from its SVG."""

import re

from ray_jobs.reporting import plots
from ray_jobs.reporting.plots import Measured

POINTS = [{"step": step, "loss": 1.0 / step, "learning_rate": 0.1} for step in range(1, 11)]


def markers(svg: str, series: int) -> int:
    return len(re.findall(rf"<use [^>]*{re.escape(f'var(--series-{series})')}", svg))


def test_a_sweep_shows_each_rate_and_the_range_of_its_folds() -> None:
    trials = [{"learning_rate": rate, "accuracies": [rate, 2 * rate]} for rate in (1e-3, 3e-3, 1e-2)]
    svg = plots.search(trials, trials[1])
    assert (markers(svg, 1), markers(svg, 2)) == (3, 1)
    for text in ("0.001", "0.003", "0.01"):
        assert f">{text}<" in svg


def test_a_search_shows_each_field_against_accuracy_and_which_trials_were_ended() -> None:
    points = [
        {"learning_rate": rate, "steps": 100, "randaugment": layers}
        for rate in (0.001, 0.1)
        for layers in (None, {"layers": 2, "magnitude": 10})
    ]
    trials = [
        {"number": number, "point": point, "accuracies": [0.1 * number]}
        | ({"pruned_at": 9} if number % 2 else {})
        for number, point in enumerate(points)
    ]
    svg = plots.search(trials, trials[2])
    fills = re.findall(rf"<use [^>]*fill: {re.escape('var(--series-1)')}", svg)
    assert (markers(svg, 1), len(fills), markers(svg, 2)) == (3 * 4, 3 * 2, 3), "two of four are hollow"
    for text in ("learning rate", "0.001", "steps", "randaugment", "none", "magnitude 10"):
        assert f">{text}<" in svg


def test_a_training_curve_shows_accuracy_and_loss_on_held_out_images_where_they_were_measured() -> None:
    assert "accuracy" not in plots.loss([POINTS, POINTS])
    both = plots.loss([POINTS], [Measured("dev", (4, 7, 10), (0.3, 0.5, 0.6), (1.0, 0.8, 0.7))])
    assert "accuracy" in both
    assert markers(both, 3) == 2 * 3 + 1, "one per evaluation, above for the loss, and one in the legend"
    watched = plots.loss([POINTS], [Measured("5-shot dev, to watch only", (5, 10), (0.5, 0.6))])
    assert "5-shot dev, to watch only" in watched
    assert markers(watched, 3) == 2 + 1


def test_five_folds_have_five_colours() -> None:
    svg = plots.loss(
        [POINTS], [Measured(f"fold {number}", (1, 2), (0.1 * number, 0.5)) for number in range(5)]
    )
    assert all(markers(svg, series) >= 2 + 1 for series in range(2, 7))
    assert all(f">fold {number}<" in svg for number in range(5))
