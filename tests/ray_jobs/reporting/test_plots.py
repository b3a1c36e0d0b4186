"""What a plot draws, from its SVG."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from ray_jobs.reporting import figures
from ray_jobs.reporting.drawing import plots, svg
from ray_jobs.reporting.drawing.plots import Curve, Measured

POINTS = [{"step": step, "loss": 1.0 / step, "learning_rate": 0.1} for step in range(1, 11)]
HOSTILE = "</title><script>alert(1)</script>\"' onload='x"


def marks(drawn: str, series: int) -> list[str]:
    """The titles of a series' points."""
    return re.findall(rf'<path d="[^"]*" class="mark s{series}[^"]*" role="img"><title>([^<]*)', drawn)


def test_a_sweep_shows_each_rate_and_the_range_of_its_folds() -> None:
    trials = [{"learning_rate": rate, "accuracies": [rate, 2 * rate]} for rate in (1e-3, 3e-3, 1e-2)]
    drawn = plots.search(trials, trials[1])
    assert marks(drawn, 1) == [
        "learning rate 0.001: 0.1%, folds 0.1% to 0.2%",
        "learning rate 0.003: 0.5%, folds 0.3% to 0.6%, chosen",
        "learning rate 0.01: 1.5%, folds 1.0% to 2.0%",
    ]
    assert drawn.count("mark s2 ring") == 1
    for text in ("0.001", "0.003", "0.01"):
        assert f">{text}<" in drawn


def test_a_search_shows_each_field_against_accuracy_and_which_trials_were_ended() -> None:
    points = [
        {"learning_rate": rate, "steps": 100, "randaugment": layers}
        for rate in (0.001, 0.1)
        for layers in (None, {"layers": 2, "magnitude": 10})
    ]
    trials = [
        {"number": number, "point": point, "accuracies": [0.1 * number]} | ({"pruned_at": 9} if number % 2 else {})
        for number, point in enumerate(points)
    ]
    drawn = plots.search(trials, trials[2])
    assert len(marks(drawn, 1)) == 3 * 4 and drawn.count("hollow") == 3 * 2, "two of four were ended"
    assert sum("ended early" in title for title in marks(drawn, 1)) == 6
    for text in ("learning rate", "0.001", "steps", "randaugment", "none", "magnitude 10"):
        assert f">{text}<" in drawn


def test_a_training_curve_shows_accuracy_and_loss_on_held_out_images_where_they_were_measured() -> None:
    assert "held-out" not in plots.loss([POINTS, POINTS])
    both = plots.loss([POINTS], [Measured("dev", (4, 7, 10), (0.3, 0.5, 0.6), (1.0, 0.8, 0.7))])
    assert marks(both, 3) == [f"dev, step {step}: accuracy {share}.0%" for step, share in ((4, 30), (7, 50), (10, 60))]
    assert "<title>dev: loss 1 to 0.7" in both and "training loss, 1 at step 1 to 0.1 at step 10" in both
    watched = plots.loss([POINTS], [Measured("5-shot dev, to watch only", (5, 10), (0.5, 0.6))])
    assert "5-shot dev, to watch only" in watched and "dotted" not in watched


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_an_axis_of_fractions_stays_between_nothing_and_everything(share: float) -> None:
    """An axis from -100% to 100% was drawn once, because all values were 0."""
    drawn = plots.loss([POINTS], [Measured("dev", (4, 7), (share, share))], "all labels right")
    ticks = [float(tick) for tick in re.findall(r">(-?[\d.]+)%</text>", drawn)]
    assert len(ticks) > 1 and min(ticks) >= 0 and max(ticks) <= 100
    assert "all labels right on held-out images" in drawn and "accuracy" not in drawn


def test_the_curve_of_several_labels_counts_images_with_all_of_them_right() -> None:
    """Also of a model that was scored apart, because it has seen test images."""
    stage = {"artifact": "a", "stage": "vit", "job": "finetune", "inputs": {}, "seconds": 1.0}
    trained = {"finetuning": [{"artifact": "a", "draws": [{"points": POINTS}]}], "pretraining": [], "sweeps": []}
    scores = {"other_metrics": [{"artifact": "a", "metric": metric} for metric in ("mAP", "micro-F1")]}
    numbers = {"costs": [], "stages": [stage], "mistakes": None, **trained, **scores}
    drawn = figures.draw([], numbers, {"a": [Measured("dev", (4, 7), (0.1, 0.2))]})
    assert "all labels right on held-out images" in drawn["loss a"]


def test_an_axis_of_a_table_has_two_ticks() -> None:
    for low, high in ((0.27, 0.95), (0.1, 0.92), (0.501, 0.502), (0.0, 1.0)):
        assert plots.axis(svg.Scale(low, high, 0, 100)).count("<text") >= 2


def test_five_folds_have_five_looks() -> None:
    drawn = plots.loss([POINTS], [Measured(f"fold {n}", (1, 2), (0.1 * n, 0.5)) for n in range(5)])
    looks = re.findall(r'<path d="M7.0 7.0([^"]*)" class="(mark s\d)"', drawn)
    assert len(set(looks)) == 5 and all(f"fold {number}" in drawn for number in range(5))


def test_a_point_is_where_its_axes_say() -> None:
    """The position of a mark, read off the positions of the ticks' labels."""
    drawn = plots.few_shot([Curve("ViT", (1, 10), (0.5, 0.9), ((0.45, 0.55), (0.85, 0.95)))])
    root = ElementTree.fromstring(f"<div>{drawn}</div>")
    labels = {text.text: text for text in root.iter("text")}
    points = [path.get("d", "") for path in root.iter("path") if path.get("class") == "mark s1"][:2]
    for d, shots, share in zip(points, ("1", "10"), (0.5, 0.9), strict=True):
        x, y = map(float, re.findall(r"[\d.]+", d)[:2])
        assert x == pytest.approx(float(labels[shots].get("x", "")), abs=0.1)
        low, high = (float(labels[tick].get("y", "")) - 4 for tick in ("60%", "80%"))
        assert y == pytest.approx(low + (high - low) * (share - 0.6) / 0.2, abs=0.15)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.913, 0.947), (-3.2, 17.0), (0.0, 1e-12)])
def test_ticks_are_few_round_and_inside(low: float, high: float) -> None:
    found = svg.ticks(low, high)
    assert 1 <= len(found) <= 6 and all(low - 1e-12 <= tick <= high + 1e-12 for tick in found)
    steps = np.diff(found)
    assert steps == pytest.approx(steps[:1].repeat(len(steps)))


def test_names_are_escaped_wherever_they_stand() -> None:
    counts = np.array([[3, 1], [0, 2]])
    trials = [{"learning_rate": 0.1, "number": 0, "point": {"x": HOSTILE}, "accuracies": [0.5]}]
    for drawn in (
        plots.confusion([HOSTILE, "b"], counts),
        plots.few_shot([Curve(HOSTILE, (1,), (0.5,), ((0.4, 0.6),))]),
        plots.costs("GFLOPs", [plots.CostPoint(HOSTILE, HOSTILE, 1.0, 0.5)]),
        plots.search(trials, trials[0]),
    ):
        root = ElementTree.fromstring(f"<div>{drawn}</div>")
        assert not [each for each in root.iter() if each.tag == "script" or "onload" in each.attrib]
