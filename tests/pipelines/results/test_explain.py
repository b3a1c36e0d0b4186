"""What `explain` repeats: A with one field of B at a time, of the stage and of what it takes."""

from typing import Any

import pytest

from pipelines.recipe.load import parse_pipeline
from pipelines.results.explain import Difference, Repetitions, Side, attributed, repetitions
from tests.support.records import make_manifest


def side(mean: float, **probe: Any) -> Side:
    stages = {
        "drawn": {"job": "ingest", "source": {"kind": "shapes"}},
        "vit": {"job": "import", "path": "m", "preprocessing": {"mean": [mean], "std": [0.5]}},
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
    assert mean.inputs() == {"data": ("a_drawn",), "backbone": ("a_with_3_backbone",)}
    assert stages["a_with_3_backbone"].preprocessing.mean == (0.4,)
    assert stages["a_vit"].preprocessing.mean == (0.5,)
    assert mean.protocol == "leave_one_out"
    together = stages[plan().together or ""]
    assert (together.protocol, together.draws) == ("scenic", 1)
    assert stages[together.inputs()["backbone"][0]].model_dump() == stages["b_vit"].model_dump()


def test_what_cannot_be_alone_is_named() -> None:
    """scenic has one draw."""
    assert plan().alone.keys() == {"draws", "backbone.preprocessing.mean"}
    assert "draws 20: with protocol scenic it must be 1" in plan().impossible["protocol"]


def test_effects_are_of_a_and_the_rest_is_what_they_do_not_add_up_to() -> None:
    few = ("few-shot linear", 5)
    values: dict[str, dict[tuple[str, int | None], float]] = {
        "a_probe": {few: 0.5, ("linear probe", None): 0.9},
        "b_probe": {few: 0.7},
        "a_with_2": {few: 0.51},
        "a_with_3": {few: 0.6},
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
