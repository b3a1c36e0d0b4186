"""What a plot draws, from its SVG."""

import re

from ray_jobs.reporting import plots
from ray_jobs.reporting.plots import Measured

POINTS = [{"step": step, "loss": 1.0 / step, "learning_rate": 0.1} for step in range(1, 11)]


def markers(svg: str, series: int) -> int:
    return len(re.findall(rf"<use [^>]*{re.escape(f'var(--series-{series})')}", svg))


def test_a_training_curve_shows_accuracy_and_loss_on_held_out_images_where_they_were_measured() -> None:
    assert "accuracy" not in plots.loss([POINTS, POINTS])
    both = plots.loss([POINTS], [Measured("dev", (4, 7, 10), (0.3, 0.5, 0.6), (1.0, 0.8, 0.7))])
    assert "accuracy" in both
    assert markers(both, 3) == 2 * 3 + 1, "one per evaluation, above for the loss, and one in the legend"
    watched = plots.loss([POINTS], [Measured("5-shot dev, to watch only", (5, 10), (0.5, 0.6))])
    assert "5-shot dev, to watch only" in watched
    assert markers(watched, 3) == 2 + 1
