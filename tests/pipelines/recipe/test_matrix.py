"""A matrix stands for its members written by hand: the same stages, the same keys; what it gets wrong is said."""

import copy
import itertools
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import identity
from pipelines.recipe import matrix
from pipelines.recipe.load import load_pipeline, schema
from pipelines.recipe.pipeline import Pipeline, base, members
from pipelines.spec import RecipeError
from pipelines.store import open_store, read_events
from tests.conftest import Vitflow
from tests.support import paths

TINY = yaml.safe_load(paths.TINY.read_text())
FINETUNE, PROBE = TINY["stages"]["finetune"], TINY["stages"]["probe"]


@pytest.fixture
def recipe(tmp_path: Path) -> Any:
    """Read the tiny recipe with these stages changed (None: left out) or added."""

    def load(*overrides: str, **stages: dict[str, Any] | None) -> Pipeline:
        raw = {"name": "x", "stages": dict(TINY["stages"])}
        for name, change in stages.items():
            raw["stages"][name] = raw["stages"].get(name, {}) | (change or {})
        # copied one by one: what is shared would be written as an alias
        raw["stages"] = {
            name: copy.deepcopy(stage) for name, stage in raw["stages"].items() if stages.get(name, ...) is not None
        }
        (tmp_path / "x.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))
        return load_pipeline(str(tmp_path / "x.yaml"), overrides)

    return load


def names(pipeline: Pipeline, stage: str) -> list[str]:
    return [name for name in pipeline.stages if base(name) == stage]


WIDTHS = {"model.width": [16, 32], "seed": [0, 1]}


def test_members_are_what_one_would_write_by_hand(recipe: Any) -> None:
    expanded = recipe(pretrain={"matrix": WIDTHS})
    for width, seed in itertools.product([16, 32], [0, 1]):
        stage = expanded.stages[f"pretrain@width={width},seed={seed}"]
        by_hand = recipe(f"pretrain.model.width={width}", f"pretrain.seed={seed}").stages["pretrain"]
        assert stage == by_hand
        inputs = {"data": ["d" * 64]}
        assert identity.stage_key(stage, inputs, None) == identity.stage_key(by_hand, inputs, None)
    assert len(names(expanded, "pretrain")) == 4
    assert "pretrain" not in expanded.stages


def test_what_takes_a_member_follows_and_a_report_takes_all(recipe: Any) -> None:
    found = recipe(pretrain={"matrix": WIDTHS}, probe={"matrix": {"draws": [2, 3]}})
    assert names(found, "finetune") == [f"finetune@width={width},seed={seed}" for width in (16, 32) for seed in (0, 1)]
    for name in names(found, "finetune"):
        assert found.stages[name].backbone == f"pretrain@{name.partition('@')[2]}"
    assert names(found, "probe") == [
        f"probe@width={width},seed={seed},draws={draws}" for width in (16, 32) for seed in (0, 1) for draws in (2, 3)
    ]
    expected = [
        "digits",
        *names(found, "pretrain"),
        *names(found, "finetune"),
        *names(found, "probe"),
        "pixels",
    ]
    assert list(found.stages["report"].of) == expected, "the report shows the names of members"


def test_inputs_are_joined_on_the_axes_that_they_share_and_multiplied_by_the_others(recipe: Any) -> None:
    found = recipe(digits={"matrix": {"max_bad_fraction": [0.1, 0.2]}}, pretrain={"matrix": {"seed": [0, 1]}})
    assert names(found, "pretrain") == [
        f"pretrain@max_bad_fraction={bad},seed={seed}" for bad in (0.1, 0.2) for seed in (0, 1)
    ]
    assert len(names(found, "probe")) == 4, "probe takes digits and what was pretrained on the same digits"
    for name in names(found, "probe"):
        bad, seed = re.fullmatch(r"probe@max_bad_fraction=(.*),seed=(.*)", name).groups()  # type: ignore[union-attr]
        assert found.stages[name].data == f"digits@max_bad_fraction={bad}"
        assert found.stages[name].backbone == f"pretrain@max_bad_fraction={bad},seed={seed}"
    apart = recipe(
        digits={"matrix": {"max_bad_fraction": [0.1, 0.2]}},
        others={
            "job": "ingest",
            "source": {"kind": "digits"},
            "matrix": {"max_bad_fraction": [0.1, 0.2, 0.3]},
        },
        finetune={"data": "others"},
    )
    assert len(names(apart, "finetune")) == 6, "two axes with one name are two axes"
    assert "finetune@others.max_bad_fraction=0.3,digits.max_bad_fraction=0.1" in apart.stages


def test_an_input_may_name_a_part_and_an_axis_may_be_an_input(recipe: Any) -> None:
    part = recipe(pretrain={"matrix": WIDTHS}, probe={"backbone": "pretrain@seed=1"})
    assert names(part, "probe") == ["probe@width=16", "probe@width=32"]
    assert part.stages["probe@width=32"].backbone == "pretrain@width=32,seed=1"
    one = recipe(pretrain={"matrix": WIDTHS}, probe={"backbone": "pretrain@width=32,seed=1"})
    assert one.stages["probe"].backbone == "pretrain@width=32,seed=1"
    some = recipe(pretrain={"matrix": WIDTHS}, report={"of": ["pretrain@width=16", "digits"]})
    assert some.stages["report"].of == ("pretrain@width=16,seed=0", "pretrain@width=16,seed=1", "digits")
    over = recipe(pretrain={"matrix": {"seed": [0, 1]}}, probe={"matrix": {"backbone": ["pretrain", "finetune"]}})
    assert names(over, "probe") == [f"probe@seed={s},backbone={b}" for s in (0, 1) for b in ("pretrain", "finetune")]


def test_checkpoints_of_a_pretraining_may_be_an_axis(recipe: Any) -> None:
    along = {"backbone.checkpoint": ["step:5", "best", "last"]}
    found = recipe(pretrain={"matrix": {"seed": [0, 1]}, "keep_steps": [5]}, probe={"matrix": along})
    assert names(found, "probe") == [
        f"probe@seed={seed},checkpoint={name}" for seed in (0, 1) for name in ("step-5", "best", "last")
    ]
    for seed in (0, 1):
        pretrain = f"pretrain@seed={seed}"
        step, best, last = (found.stages[name] for name in names(found, "probe") if f"seed={seed}" in name)
        assert {step.inputs()["backbone"], best.inputs()["backbone"]} == {(pretrain,)}
        assert (step.checkpoints(), best.checkpoints()) == ({"backbone": "step:5"}, {"backbone": "best"})
        assert last.backbone == pretrain
    by_hand = [{"stage": "pretrain", "checkpoint": name} for name in along["backbone.checkpoint"]]
    written = recipe(pretrain={"keep_steps": [5]}, probe={"matrix": {"backbone": by_hand}})
    expected = [found.stages[name].checkpoints() for name in names(found, "probe")][:3]
    assert [written.stages[name].checkpoints() for name in names(written, "probe")] == expected


def test_targets_name_all_members_or_a_part(recipe: Any) -> None:
    found = recipe(pretrain={"matrix": WIDTHS})
    assert set(found.needed_for(("pretrain",))) == {"digits", *names(found, "pretrain")}
    assert set(found.needed_for(("probe@seed=1",))) == {
        "digits",
        *(f"{stage}@width={width},seed=1" for stage in ("pretrain", "probe") for width in (16, 32)),
    }
    assert set(found.needed_for(("pretrain@seed=1,width=16",))) == {"digits", "pretrain@width=16,seed=1"}
    with pytest.raises(RecipeError, match=r"pretrain has no member 'seed=7'; did you mean 'seed=1'\?"):
        found.needed_for(("pretrain@seed=7",))
    with pytest.raises(RecipeError, match=r"no stage is called 'pretran'; did you mean 'pretrain'\?"):
        found.needed_for(("pretran",))


def test_overrides_apply_to_all_members_and_an_axis_is_changed_by_name(recipe: Any) -> None:
    found = recipe("pretrain.steps=7", "pretrain.matrix.model.width=[8, 16, 24]", pretrain={"matrix": WIDTHS})
    assert len(names(found, "pretrain")) == 6
    assert all(found.stages[name].steps == 7 for name in names(found, "pretrain"))
    for override in ("pretrain.seed=3", "pretrain.model.width=8"):
        with pytest.raises(RecipeError, match=r"is an axis of the matrix of pretrain.*--set pretrain\.matrix\."):
            recipe(override, pretrain={"matrix": WIDTHS})
    added = recipe("pretrain.matrix.seed=[4, 5]")
    assert names(added, "pretrain") == ["pretrain@seed=4", "pretrain@seed=5"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "stages.pretrain.matrix: expected fields with their values"),
        ({}, "stages.pretrain.matrix: expected fields with their values"),
        ({"seed": []}, "stages.pretrain.matrix.seed: expected a list of values"),
        ({"seed": 3}, "stages.pretrain.matrix.seed: expected a list of values"),
        ({"model": {"width": [1, 2]}}, "stages.pretrain.matrix.model: expected a list of values"),
        ({"seed": [1, 2, 1]}, "stages.pretrain.matrix.seed: duplicate value 1"),
        ({"steps": [1, 1.0]}, "stages.pretrain.matrix.steps: duplicate value 1.0"),
        ({"job": ["ingest"]}, "stages.pretrain.matrix.job: a stage has one job"),
        ({"seed; rm": [1]}, "stages.pretrain.matrix: 'seed; rm' is not a field"),
        ({7: [1]}, "stages.pretrain.matrix: 7 is not a field"),
        ({"steps.x": [1]}, "stages.pretrain.matrix.steps.x: steps has no fields of its own"),
        ({"model.width": [16], "model": [{}]}, "model.width is inside model"),
        (
            {"seed": list(range(50)), "steps": list(range(1, 52))},
            "50 seed x 51 steps makes 2550 stages; at most",
        ),
        (
            {"sead": [1, 2]},
            "stages.pretrain.sead: there is no such field; did you mean 'seed'? (in pretrain@sead=1",
        ),
        (
            {"model.widht": [1, 2]},
            "stages.pretrain.model.widht: there is no such field; did you mean 'width'?",
        ),
        ({"steps": [5, "many"]}, "not 'many' (in pretrain@steps=many)"),
        ({"data": ["digits", "digit"]}, "stages.pretrain@data=digit.data: no stage is called 'digit'"),
    ],
)
def test_a_bad_matrix_names_the_stage_and_the_axis(recipe: Any, given: Any, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        recipe(pretrain={"matrix": given})
    assert message in str(error.value)
    assert len(str(error.value)) < 500, "what is wrong in all members is said once"


def test_what_follows_can_be_too_many_and_a_cycle_is_shown(recipe: Any) -> None:
    with pytest.raises(RecipeError, match=r"stages\.finetune\.backbone: its inputs expand it to more than 2000 stages"):
        recipe(
            digits={"matrix": {"max_bad_fraction": [n / 100 for n in range(50)]}},
            pretrain={"data": "other", "matrix": {"seed": list(range(41))}},
            other={"job": "ingest", "source": {"kind": "digits"}},
        )
    with pytest.raises(RecipeError, match="stages: 2003 after expanding; at most 2000"):
        recipe(
            pretrain={"matrix": {"seed": list(range(1000))}},
            finetune=None,
            report=None,
            pixels=None,
            a=TINY["stages"]["digits"],
            b=TINY["stages"]["digits"],
        )
    with pytest.raises(RecipeError, match="a cycle"):
        recipe(
            finetune={"backbone": "again"},
            again=FINETUNE | {"backbone": "finetune", "matrix": {"seed": [1, 2]}},
        )


def test_only_a_matrix_makes_names_with_an_at_sign(recipe: Any) -> None:
    with pytest.raises(RecipeError, match=r"stages\.a@b=1: '@' is reserved for the members"):
        recipe(**{"a@b=1": PROBE})


plain_name = re.compile(r"pretrain@[A-Za-z0-9_.,=+-]+")
yaml_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.lists(st.integers()),
    st.dictionaries(st.text(), st.text()),
    st.fixed_dictionaries({"name": st.text()}),
)


@settings(max_examples=50)
@given(
    st.dictionaries(
        st.sampled_from(["a", "a.b", "b.a", "c.a"]),
        st.lists(yaml_values, min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    )
)
def test_names_are_plain_and_no_two_are_the_same(axes: dict[str, Any]) -> None:
    try:
        found = matrix.expand({"stages": {"pretrain": {"job": "pretrain", "matrix": axes}}})["stages"]
    except RecipeError:
        return
    assert len(found) == len(list(itertools.product(*axes.values())))
    assert all(plain_name.fullmatch(name) for name in found)
    assert all(members(name, found) == (name,) for name in found)
    echoed = subprocess.run(["sh", "-c", f"echo {' '.join(found)}"], capture_output=True, text=True, check=True)
    assert echoed.stdout.split() == list(found), "a shell takes them as they are"


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([2, 0.5, True, None, "x"], ["2", "0.5", "true", "null", "x"]),
        (["/data/vtab/caltech101", "/data/vtab/dtd/"], ["caltech101", "dtd"]),
        (["logistic regression", "k-NN"], ["logistic-regression", "k-NN"]),
        ([{"kind": "folder", "name": "a"}, {"kind": "folder", "name": "b"}], ["a", "b"]),
        ([[1, 2], [3]], ["1-2", "3"]),
        ([[1, {}], [3]], ["1", "2"]),
        ([{"depth": 4, "width": 16}, {"depth": 4, "width": 32}], ["width-16", "width-32"]),
        ([{"depth": 4}, {"width": 4}], ["1", "2"]),
        ([{"size": {"width": 16}}, {"size": {"width": 32}}], ["1", "2"]),
        (["a/x", "b/x"], ["1", "2"]),
        ([1, "1"], ["1", "2"]),
        (["é", "x" * 41], ["1", "2"]),
    ],
)
def test_how_values_are_called(values: list[Any], labels: list[str]) -> None:
    found = matrix.expand({"stages": {"s": {"job": "ingest", "matrix": {"source.root": values}}}})["stages"]
    assert list(found) == [f"s@root={label}" for label in labels]
    assert [stage["source"]["root"] for stage in found.values()] == values


def test_the_schema_knows_matrix_and_a_plan_holds_its_members(recipe: Any, tmp_path: Path) -> None:
    from pipelines.engine import runs

    for job in ("Ingest", "Pretrain", "Report"):
        assert "matrix" in schema()["$defs"][job]["properties"]
    store = open_store(str(tmp_path / "store"))
    pipeline = recipe(pretrain={"matrix": WIDTHS})
    run = runs.start_run(store, pipeline, ("probe",), ("probe@width=16,seed=0",))
    assert runs.load_run(store, run.id).pipeline == pipeline
    shown = [stage["stage"] for stage in runs.run_status(store, run.id)["stages"]]
    assert set(shown) == {"digits", *names(pipeline, "pretrain"), *names(pipeline, "probe")}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.full
def test_a_failed_member_stops_what_follows_it_and_no_sibling(tmp_path: Path, vitflow_local: Vitflow) -> None:
    """One class folder has a damaged image, which one member does not tolerate; the others make equal datasets."""
    from PIL import Image

    for name, colour in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(12):
            shade = tuple(max(0, part - 5 * number) for part in colour)
            Image.new("RGB", (8, 8), shade).save(tmp_path / "images" / name / f"{number}.png")
    (tmp_path / "images" / "red" / "bad.png").write_bytes(b"no image")
    folder = {"kind": "folder", "root": str(tmp_path / "images")}
    baselines = {"job": "baselines", "data": "images", "methods": ["majority"], "thumbnail": 8}
    stages = {
        "images": {"job": "ingest", "source": folder, "matrix": {"max_bad_fraction": [0.0, 0.5, 0.6]}},
        "pixels": baselines | {"labels": {"per_class": 2, "draws": 1, "folds": 2}},
    }
    (tmp_path / "x.yaml").write_text(yaml.safe_dump({"name": "x", "stages": stages}))
    store = ("--store", tmp_path / "s")
    done = vitflow_local("run", tmp_path / "x.yaml", *store, check=1)
    assert "failed: images@max_bad_fraction=0.0" in done.stderr
    opened = open_store(str(tmp_path / "s"))
    (run,) = opened.names("runs")
    ends = {e["stage"]: e for e in read_events(opened, run) if e["event"] == "stage"}
    status = {stage: event["status"] for stage, event in ends.items()}
    assert status["images@max_bad_fraction=0.0"] == "FAILED"
    assert status["pixels@max_bad_fraction=0.0"] == "SKIPPED"
    made = [f"{stage}@max_bad_fraction={bad}" for stage in ("images", "pixels") for bad in (0.5, 0.6)]
    assert {status[stage] for stage in made} <= {"SUCCEEDED", "CACHED"}
    assert ends[made[2]]["key"] == ends[made[3]]["key"], "the same content behind it: one result for both"
    assert opened.names(f"artifacts/baselines/{ends[made[2]]['key']}/attempts") == ["1"]
    log = vitflow_local("logs", run, "images@max_bad_fraction=0.5", *store).stdout
    assert log.startswith("--- images@max_bad_fraction=0.5 (attempt 1, SUCCEEDED)")
    assert vitflow_local("logs", run, "images", *store).stdout.count("--- images@") == 3
    again = vitflow_local("run", tmp_path / "x.yaml", *store, "--only", "pixels@max_bad_fraction=0.5")
    assert again.stdout.count("CACHED") == 2
