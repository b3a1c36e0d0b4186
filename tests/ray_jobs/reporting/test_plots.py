"""What a plot draws, from its SVG."""

import re

from ray_jobs.reporting import plots


def test_a_training_curve_shows_accuracy_on_dev_where_it_was_measured() -> None:
    points = [{"step": step, "loss": 1.0 / step, "learning_rate": 0.1} for step in range(1, 11)]
    assert "dev accuracy" not in plots.loss([points, points])
    measured = [point | {"dev_accuracy": 0.5 if point["step"] in (4, 7, 10) else None} for point in points]
    svg = plots.loss([measured])
    assert "dev accuracy" in svg
    assert len(re.findall(rf"<use [^>]*{re.escape('var(--series-3)')}", svg)) == 3, (
        "one marker per evaluation"
    )
