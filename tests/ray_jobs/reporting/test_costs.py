"""Which backbones a report shows beside their cost, and what the plot of them has on its axis."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.store import InputRef
from ray_jobs.evaluation.cost import Cost, Speed, write_cost
from ray_jobs.reporting import costs
from ray_jobs.reporting.drawing import plots
from ray_jobs.reporting.measures import Entry
from ray_jobs.reporting.provenance import Part
from tests.support.records import make_manifest
from tests.support.scores import make_entry

IMAGES = 200
RATES = {"small": 0.6, "large": 0.9}


def entry(stage: str, protocol: str = "fine-tuning", shots: int | None = None, **fields: Any) -> Entry:
    """A stage's accuracy; its name begins with that of its backbone."""
    rng = np.random.default_rng(len(stage))
    correct = rng.random((1, IMAGES)) < RATES.get(stage.split("_")[0], 0.5)
    return make_entry(correct, stage, protocol=protocol, labels_per_class=shots, **fields)


def part(folder: Path, stage: str, device: str = "A processor", is_measured: bool = True) -> Part:
    """A stage that took the backbone of its name, and its files."""
    backbone = stage.split("_")[0]
    taken = InputRef(job="import", key=f"key-of-{backbone}", content_digest="d", manifest_sha256="m")
    manifest = make_manifest("finetune", key=stage, stage=stage, inputs={"backbone": [taken]})
    (folder / stage).mkdir()
    if is_measured:
        speed = Speed(images=32, dtype="float32", images_per_second=100.0, peak_bytes=None)
        write_cost(
            folder / stage,
            Cost(resolution=16, parameters=9, gflops=2.5, device=device, threads=1, forward=speed),
        )
    return stage, manifest, folder / stage


def imported(folder: Path, name: str) -> Part:
    return name, make_manifest("import", key=f"key-of-{name}", stage=name), folder


def test_backbones_that_were_scored_alike_are_compared_with_the_best(tmp_path: Path) -> None:
    given = [entry(name) for name in ("small_tuned", "large_tuned")]
    parts = [imported(tmp_path, "small"), *(part(tmp_path, one.stage) for one in given)]
    [group] = costs.costs(given, parts, {"small_tuned": 2})
    assert (group["task"], group["protocol"], group["labels"]) == ("photos", "fine-tuning", "all labels")
    assert group["backbones"] == 2
    best, other = group["lines"]
    assert (best["backbone"], other["backbone"]) == ("large_tuned", "small"), (
        "a backbone that the report does not have is called as the stage that took it"
    )
    assert (best["minus_best"], best["gflops"], best["forward"]["images_per_second"]) == (None, 2.5, 100.0)
    expected = np.mean(given[0].correct) - np.mean(given[1].correct)
    difference = other["minus_best"]
    assert difference["value"] == pytest.approx(expected)
    assert difference["low"] < expected < difference["high"] < 0
    worse = np.stack([given[1].correct[0], np.zeros(IMAGES, bool)])  # a second training that learned nothing
    best, other = costs.costs([given[0], make_entry(worse, "large_tuned")], parts, {})[0]["lines"]
    assert (best["accuracy"], other["accuracy"]) == (given[0].correct.mean(), worse.mean())
    assert other["minus_best"]["value"] == pytest.approx(worse.mean() - given[0].correct.mean())


def test_what_cannot_be_compared_is_left_out(tmp_path: Path) -> None:
    def shown(*given: Entry, unmeasured: tuple[str, ...] = ()) -> list[tuple[str, list[str]]]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        stages = dict.fromkeys(one.stage for one in given)
        parts = [part(folder, stage, is_measured=stage not in unmeasured) for stage in stages]
        return [
            (group["protocol"], sorted(line["stage"] for line in group["lines"]))
            for group in costs.costs(given, parts, {})
        ]

    tuned = [entry("small_tuned"), entry("large_tuned")]
    both = [("fine-tuning", ["large_tuned", "small_tuned"])]
    assert shown(*tuned) == both
    assert shown(*tuned, entry("other_scratch", method="ViT, from scratch")) == both
    assert shown(*tuned, unmeasured=("small_tuned",)) == []
    assert shown(entry("small_tuned"), entry("small_longer")) == [], "one backbone, trained in two ways"
    probes = [entry(f"{name}_probe", "few-shot linear", shots) for name in ("small", "large") for shots in (1, 5)]
    assert shown(*probes) == [("few-shot linear", ["large_probe", "small_probe"])], "the verdict's shots only"
    elsewhere = entry("large_tuned", task="letters")
    assert shown(entry("small_tuned"), elsewhere) == []


@pytest.mark.parametrize(
    ("devices", "unit", "cost"),
    [
        (("A", "A"), "images/s, forward pass (right: cheaper)", 100.0),
        (("A", "B"), "GFLOPs per image, forward pass (left: cheaper)", 2.5),
    ],
)
def test_speeds_of_different_machines_are_not_plotted(
    tmp_path: Path, devices: tuple[str, str], unit: str, cost: float
) -> None:
    given = [entry(name) for name in ("small_tuned", "large_tuned")]
    parts = [part(tmp_path, one.stage, device) for one, device in zip(given, devices, strict=True)]
    shown_unit, points = costs.points(costs.costs(given, parts, {}))["photos"]
    assert shown_unit == unit and {point.cost for point in points} == {cost}
    svg = plots.costs(unit, points)
    for text in (unit, "small_tuned", "large_tuned", "fine-tuning, all labels"):
        assert f"{text}<" in svg
    assert [svg.count(f'class="mark s{number}"') for number in (1, 2)] == [2, 2], "a point, and one in the legend"


def test_seeds_of_a_matrix_are_one_point_by_flops() -> None:
    def line(width: int, seed: int, accuracy: float) -> dict[str, Any]:
        cost = {"gflops": width / 10, "forward": {"images_per_second": 10.0}, "device": "A", "threads": 1}
        return {"backbone": f"vit@width={width},seed={seed}", "accuracy": accuracy, **cost}

    lines = [line(32, 0, 0.2), line(32, 1, 0.4), line(64, 0, 0.5), line(64, 1, 0.7)]
    group = {"task": "photos", "protocol": "few-shot linear", "labels": "5 labels per class", "lines": lines}
    ((unit, points),) = costs.points([group]).values()
    assert unit.startswith("GFLOPs") and {point.name for point in points} == {"vit"}
    assert [point.cost for point in points] == pytest.approx([3.2, 6.4])
    assert [point.accuracy for point in points] == pytest.approx([0.3, 0.6])
