"""What `explain` repeats: A with one field of B at a time, of the stage and of what it takes."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipelines.commands.protocols import _table
from pipelines.recipe.load import parse_pipeline
from pipelines.results.explain import (
    Difference,
    Repetitions,
    Setting,
    Side,
    attributed,
    differences,
    measured,
    no_repetitions,
    repetitions,
)
from pipelines.store import InputRef, open_store
from ray_jobs.evaluation.rows import CHOSEN_ON_TEST, ON_SEEN, ON_UNSEEN, REAL, ROWS, measurement, write_table
from tests.support.records import committed, make_manifest

DRAWN = {"job": "ingest", "source": {"kind": "shapes"}}
IMPORTED = {"job": "import", "path": "m", "preprocessing": {"mean": [0.5], "std": [0.5]}}


def side(mean: float, **probe: Any) -> Side:
    stages = {
        "drawn": DRAWN,
        "vit": IMPORTED | {"preprocessing": {"mean": [mean], "std": [0.5]}},
        "probe": {"job": "evaluate", "data": "drawn", "backbone": "vit", **probe},
    }
    pipeline = parse_pipeline({"name": "x", "stages": stages}, "x")
    return Side(make_manifest("evaluate", stage="probe"), pipeline)


A, B = side(0.5, shots=[5]), side(0.4, shots=[5], protocol="scenic")
FOUND = [
    Difference("", "protocol", "leave_one_out", "scenic"),
    Difference("", "draws", 20, 1),
    Difference("backbone", "preprocessing.mean", [0.5], [0.4]),
]


def plan() -> Repetitions:
    return repetitions(A, B, FOUND)


def test_each_difference_is_exchanged_alone_and_all_together() -> None:
    stages = plan().pipeline.stages
    assert (plan().a, plan().b) == ("a_probe", "b_probe")
    mean = stages[plan().alone["backbone.preprocessing.mean"]]
    assert mean.inputs() == {"data": ("a_drawn",), "backbone": ("a_with_3_mean_backbone",)}
    assert stages["a_with_3_mean_backbone"].preprocessing.mean == (0.4,)
    assert stages["a_vit"].preprocessing.mean == (0.5,)
    assert mean.protocol == "leave_one_out"
    together = stages[plan().together or ""]
    assert (together.protocol, together.draws) == ("scenic", 1)
    assert stages[together.inputs()["backbone"][0]].model_dump() == stages["b_vit"].model_dump()


def test_a_backbone_instead_of_a_new_model_is_one_difference(tmp_path: Path) -> None:
    fields = {
        "job": "finetune",
        "data": "drawn",
        "resolution": 8,
        "learning_rates": [0.1],
        "steps": 1,
        "batch_size": 1,
    }
    used = InputRef(job="ingest", key="k", content_digest="d", manifest_sha256="s")
    sides = []
    for start in ({"model": {"patch_size": 4, "width": 8, "depth": 1, "num_heads": 1}}, {"backbone": "vit"}):
        stages = {"drawn": DRAWN, "vit": IMPORTED, "tuned": fields | start}
        inputs = {role: [used] for role in ("data", *({"backbone"} & start.keys()))}
        manifest = make_manifest("finetune", stage="tuned", inputs=inputs)
        sides.append(Side(manifest, parse_pipeline({"name": "x", "stages": stages}, "x")))
    a, b = sides
    (found,) = differences(open_store(str(tmp_path)), a, b)
    assert (found.name, found.b) == ("backbone", "vit")
    planned = repetitions(a, b, [found])
    assert planned.pipeline.stages[planned.alone["backbone"]].inputs()["backbone"] == ("b_vit",)


def test_what_cannot_be_alone_is_named() -> None:
    """scenic has one draw."""
    assert plan().alone.keys() == {"draws", "backbone.preprocessing.mean"}
    assert "draws 20: with protocol scenic it must be 1" in plan().impossible["protocol"]


def test_effects_are_of_a_and_the_rest_is_what_they_do_not_add_up_to() -> None:
    few = Setting("few-shot linear", 5)
    values: dict[str, dict[Setting, float]] = {
        "a_probe": {few: 0.5, Setting("linear probe", None): 0.9},
        "b_probe": {few: 0.7},
        "a_with_2_draws": {few: 0.51},
        "a_with_3_mean": {few: 0.6},
        "together": {few: 0.7},
    }
    (line,) = attributed(plan(), FOUND, values)
    assert [field["field"] for field in line["fields"]] == [
        "backbone.preprocessing.mean",
        "draws",
        "protocol",
    ]
    assert [field["effect"] for field in line["fields"]] == [pytest.approx(0.1), pytest.approx(0.01), None]
    assert line["together"] == pytest.approx(0.2)
    assert line["rest"] == pytest.approx(0.09)
    console = Console(width=200, file=io.StringIO())
    console.print(_table([line], FOUND))
    assert all(row.strip() for row in console.file.getvalue().strip().splitlines())  # type: ignore[attr-defined]


def test_results_without_a_common_setting_are_shown_beside_each_other() -> None:
    values = {"a_probe": {Setting("linear probe", None): 0.9}, "b_probe": {Setting("fine-tuning", None): 0.8}}
    lines = attributed(no_repetitions(A, B), [], values)
    assert [(line["a"], line["b"], line["rest"]) for line in lines] == [(None, 0.8, None), (0.9, None, None)]


def test_an_accuracy_is_of_one_set_of_labels_and_one_part_of_test(tmp_path: Path) -> None:
    """ReaL's labels, and images that the model was trained on, count apart; settings chosen on test do not."""
    store = open_store(str(tmp_path / "store"))
    scored = {
        ("Pets", "ViT, pretrained"): 0.5,
        ("Pets" + REAL, "ViT, pretrained"): 0.7,
        ("Pets", "ViT, pretrained" + ON_SEEN): 0.9,
        ("Pets" + REAL, "ViT, pretrained" + ON_UNSEEN): 0.4,
        ("Cars", "ViT, pretrained" + CHOSEN_ON_TEST): 0.6,
        ("Pets", "ViT, untrained"): 0.1,
        ("Pets", "pixels" + CHOSEN_ON_TEST): 0.2,
        ("Pets", "majority"): 0.3,
    }
    for key in ("Pets", "Cars"):
        rows = [
            measurement(
                {"task": task, "protocol": "few-shot linear, scenic", "method": method}
                | {"labels_per_class": 5, "draw": 0},
                "accuracy",
                value,
                9,
                "dev",
                {},
            )
            for (task, method), value in scored.items()
            if task.startswith(key)
        ]
        with committed(store, "evaluate", key) as folder:
            write_table(folder / "rows.parquet", rows, ROWS)
    found = measured(store, {"a": "Pets", "b": "Cars"})
    parts = {
        "": 0.5,
        "ReaL": 0.7,
        "on test images seen in training": 0.9,
        "ReaL, on test images not seen in training": 0.4,
    }
    assert found == {
        "a": {Setting("few-shot linear", 5, part): value for part, value in parts.items()},
        "b": {Setting("few-shot linear", 5): 0.6},
    }
