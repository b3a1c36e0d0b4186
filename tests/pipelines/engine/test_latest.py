"""`init_from: latest`: which model that is, that a run records it, and when it is the result itself."""

import json
from dataclasses import replace
from typing import Any

import pytest

from pipelines import store as st
from pipelines.engine import plan, runs
from pipelines.engine.history import end_run
from pipelines.engine.latest import named_models
from pipelines.engine.plan import PlannedStage
from pipelines.engine.runs import Run
from pipelines.recipe.load import parse_pipeline
from pipelines.recipe.pipeline import Pipeline
from pipelines.spec import RecipeError
from pipelines.store import InputRef, Manifest, Store
from tests.support.records import commit_planned
from tests.support.vits import contract_for
from vit_model.config import ViTConfig

SIZE = {"patch_size": 4, "width": 16, "depth": 1, "num_heads": 2}
TARGETS = ("digits", "pretrain")


def recipe(name: str = "nightly", seed: int = 0, **fields: Any) -> Pipeline:
    """Data, which changes with its seed, and a pretraining that continues the newest."""
    pretrain = {
        "job": "pretrain",
        "data": "digits",
        "model": SIZE,
        "resolution": 8,
        "steps": 20,
        "batch_size": 32,
        "learning_rate": 1e-3,
        "init_from": "latest",
    }
    source = {"kind": "shapes", "seed": seed}
    stages = {"digits": {"job": "ingest", "source": source}, "pretrain": pretrain | fields}
    return parse_pipeline({"name": name, "stages": stages}, "test")


def planned_in(store: Store, run: Run, name: str = "pretrain") -> PlannedStage:
    """A stage as the run's driver plans it."""
    planned = plan.plan_pipeline(store, run.pipeline, TARGETS, latest=run.latest)
    return next(stage for stage in planned if stage.name == name)


def finish(store: Store, run: Run, over: bool = True) -> Manifest:
    """Drive a run: commit what is not cached, and return its model."""
    for name in TARGETS:
        stage = planned_in(store, run, name)
        if stage.manifest is None:
            commit_planned(store, stage, run.id)
        else:
            st.add_event(store, run.id, "stage", stage=name, status="CACHED", key=stage.key)
    if over:
        end_run(store, run.id, "SUCCEEDED")
    model = planned_in(store, run).manifest
    assert model is not None
    return model


def train(store: Store, pipeline: Pipeline) -> Manifest:
    """A whole run, as `vitflow run` makes it."""
    return finish(store, runs.start_run(store, pipeline, TARGETS))


def start_of(manifest: Manifest) -> list[str]:
    return [reference.key for reference in manifest.inputs.get("init_from", [])]


def test_each_run_on_new_data_continues_the_model_of_the_run_before(store: Store) -> None:
    models = [train(store, recipe(seed=seed)) for seed in range(3)]
    assert [start_of(model) for model in models] == [[], [models[0].key], [models[1].key]]
    from_scratch = recipe(seed=0, init_from=None)
    assert planned_in(store, runs.start_run(store, from_scratch, TARGETS)).key == models[0].key


@pytest.mark.parametrize("models", [1, 3])
def test_a_finished_run_that_is_repeated_makes_nothing(store: Store, models: int) -> None:
    """It would otherwise train on its own result, and on that, as long as it is repeated."""
    *_, last = [train(store, recipe(seed=seed)) for seed in range(models)]
    before = sorted(store.root.glob("artifacts/**/*"))
    for _ in range(2):
        assert train(store, recipe(seed=models - 1)).key == last.key
    assert {stage.state for stage in plan.plan_pipeline(store, recipe(seed=models - 1), TARGETS)} == {"cached"}
    assert sorted(store.root.glob("artifacts/**/*")) == before


@pytest.mark.parametrize("change", [{"steps": 21}, {"learning_rate": 1e-4}, {"resolution": 16}, {"seed": 1}], ids=str)
def test_a_changed_setting_continues_it_too(store: Store, change: dict[str, Any]) -> None:
    first = train(store, recipe())
    assert start_of(train(store, recipe(**change))) == [first.key]


def test_data_that_comes_back_is_new_to_the_model_of_other_data(store: Store) -> None:
    one, other = train(store, recipe(seed=0)), train(store, recipe(seed=1))
    again = train(store, recipe(seed=0))
    assert start_of(again) == [other.key]
    assert again.key != one.key


def test_an_execution_field_is_no_change(store: Store) -> None:
    first = train(store, recipe())
    assert train(store, recipe(threads=3)).key == first.key


def test_a_killed_run_goes_on_with_what_was_the_latest_when_it_was_planned(store: Store) -> None:
    first = train(store, recipe(seed=0))
    killed = runs.start_run(store, recipe(seed=1), TARGETS)
    commit_planned(store, planned_in(store, killed, "digits"), killed.id)
    key = planned_in(store, killed).key
    newer = train(store, recipe(seed=1, steps=21))  # another run meanwhile
    assert start_of(newer) == [first.key]
    assert runs.latest_models(store, recipe(seed=1), TARGETS) == killed.latest, "what is planned beforehand"
    again = runs.start_run(store, recipe(seed=1), TARGETS)
    assert (again.id, again.continued, again.latest) == (killed.id, True, killed.latest)
    assert runs.load_run(store, killed.id).latest == killed.latest, "the driver of a submitted run"
    assert planned_in(store, again).key == key
    assert start_of(finish(store, again)) == [first.key]
    assert runs.latest_models(store, recipe(seed=1), TARGETS) != killed.latest, "a run that is over counts no more"
    plan_json = json.loads((store.root / f"runs/{killed.id}/plan.json").read_text())
    assert plan_json["latest"]["pretrain"]["key"] == first.key


def test_a_run_killed_behind_its_model_does_not_train_again(store: Store) -> None:
    train(store, recipe(seed=0))
    killed = runs.start_run(store, recipe(seed=1), TARGETS)
    model = finish(store, killed, over=False)
    again = runs.start_run(store, recipe(seed=1), TARGETS)
    assert again.id == killed.id
    assert planned_in(store, again).manifest == model


def test_the_run_of_a_tick_keeps_what_it_found(store: Store) -> None:
    first = train(store, recipe(seed=0))
    tick = runs.start_run(store, recipe(seed=1), TARGETS, run_id="nightly-20260101-000000-tick")
    train(store, recipe(seed=2))
    again = runs.start_run(store, recipe(seed=1), TARGETS, run_id=tick.id)
    assert again.latest == tick.latest
    assert again.latest["pretrain"] == st.input_ref(store, first)


def test_a_schedule_continues_what_was_run_by_hand(store: Store) -> None:
    """Its runs are named after the schedule, but their recipe is the same."""
    tick = runs.start_run(store, recipe(seed=0), TARGETS, run_id="nightly-20260101-000000-tick")
    first = finish(store, tick)
    assert start_of(train(store, recipe(seed=1))) == [first.key]


def test_other_recipes_and_other_stages_do_not_count(store: Store) -> None:
    train(store, recipe("letters"))
    run = runs.start_run(store, recipe(seed=1), TARGETS)
    assert run.latest == {"pretrain": None}
    assert start_of(finish(store, run)) == []


def newest(store: Store) -> InputRef | None:
    return named_models(store, recipe(), TARGETS).models["pretrain"]


def test_the_newest_is_that_of_the_newest_run_that_has_one_cached_or_not(store: Store) -> None:
    old, other = train(store, recipe(seed=0)), train(store, recipe(seed=1))
    assert newest(store) == st.input_ref(store, other)
    assert train(store, recipe(seed=0, init_from=None)) == old, "cached"
    runs.start_run(store, recipe(seed=7), TARGETS)  # has not made one
    assert newest(store) == st.input_ref(store, old)


def test_an_artifact_with_missing_files_is_passed_over_and_named(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (train(store, recipe(seed=seed)) for seed in range(2))
    entry = st.FileEntry(path="model.safetensors", size=9, sha256="0" * 64)
    path = store.root / st.Layout.manifest("pretrain", second.key)
    path.write_bytes(st.encode(second.model_copy(update={"files": (entry,), "own_sha256": None})))
    assert newest(store) == st.input_ref(store, first)
    assert "does not count as the latest model of pretrain" in capsys.readouterr().err


def test_a_latest_model_that_was_removed_ends_the_run_with_its_reason(store: Store) -> None:
    first = train(store, recipe(seed=0))
    run = runs.start_run(store, recipe(seed=1), TARGETS)
    commit_planned(store, planned_in(store, run, "digits"), run.id)
    (store.root / st.Layout.manifest("pretrain", first.key)).unlink()
    with pytest.raises(RecipeError, match=r"stages\.pretrain\.init_from: .* latest was pretrain .* removed since"):
        planned_in(store, run)


def test_a_forced_rerun_starts_where_the_first_one_did_and_becomes_the_newest(store: Store) -> None:
    first, second = (train(store, recipe(seed=seed)) for seed in range(2))
    run = runs.start_run(store, recipe(seed=1), TARGETS, ("pretrain",))
    stage = planned_in(store, run)
    key = plan.force_stage(store, stage, run.force["pretrain"], run.id)
    forced = commit_planned(store, replace(stage, key=key, manifest=None), run.id)
    assert (start_of(forced), key == second.key) == ([first.key], False)
    end_run(store, run.id, "SUCCEEDED")
    assert train(store, recipe(seed=1)).key == forced.key, "unchanged: cached"
    assert start_of(train(store, recipe(seed=2))) == [forced.key]


def test_the_plan_says_what_it_would_start_from(store: Store) -> None:
    def said(pipeline: Pipeline) -> list[str]:
        return [*plan.notes(plan.plan_pipeline(store, pipeline, TARGETS))]

    digits = planned_in(store, runs.start_run(store, recipe(), TARGETS), "digits")
    commit_planned(store, digits, "r")
    assert said(recipe()) == ["pretrain: init_from latest: no model yet, so new weights"]
    first = train(store, recipe())
    assert said(recipe(steps=21)) == [f"pretrain: init_from latest: pretrain {first.key[:12]}"]
    changed = plan.plan_pipeline(store, recipe(steps=21), TARGETS)
    why = plan.reasons(changed, plan.previous_results(store, "nightly", changed))
    assert why["pretrain"] == "init_from has changed; steps 20 -> 21"
    assert not said(recipe())


def test_an_alias_is_resolved_when_the_run_is_planned_and_recorded(store: Store) -> None:
    by_alias = {"init_from": "@production"}
    scratch = train(store, recipe(seed=0, **by_alias))
    assert (start_of(scratch), scratch.key) == ([], train(store, recipe(seed=0, init_from=None)).key), "no model yet"
    st.move_alias(store, "production", st.input_ref(store, scratch), 0, "person")
    assert train(store, recipe(seed=0, **by_alias)) == scratch, "unchanged data: production is the result"
    better = train(store, recipe(seed=1, **by_alias))
    assert start_of(better) == [scratch.key]
    run = runs.start_run(store, recipe(seed=2, **by_alias), TARGETS)
    commit_planned(store, planned_in(store, run, "digits"), run.id)
    st.move_alias(store, "production", st.input_ref(store, better), 1, "rule")
    again = runs.start_run(store, recipe(seed=2, **by_alias), TARGETS)
    assert (again.id, again.latest, again.moves) == (run.id, run.latest, {"@production": 1})
    assert start_of(finish(store, again)) == [scratch.key], "a moved alias does not change a run that was planned"
    assert start_of(train(store, recipe(seed=3, **by_alias))) == [better.key]


def test_an_alias_that_names_nothing_is_refused_where_a_model_is_needed(store: Store) -> None:
    tune = {"job": "finetune", "data": "digits", "backbone": "@production", "learning_rates": [0.1]}
    raw = recipe().model_dump(mode="json")
    stages = {"digits": raw["stages"]["digits"], "tune": tune | {"steps": 2, "batch_size": 2}}
    tuned = parse_pipeline({"name": "nightly", "stages": stages}, "test")
    with pytest.raises(RecipeError, match=r"stages\.tune\.backbone: @production names no model; `vitflow alias set"):
        runs.start_run(store, tuned, tuple(stages))
    model = train(store, recipe())
    st.move_alias(store, "production", st.input_ref(store, model), 0, "person")
    run = runs.start_run(store, tuned, tuple(stages))
    _, planned = plan.plan_pipeline(store, tuned, tuple(stages), latest=run.latest)
    assert planned.inputs is not None and planned.inputs["backbone"] == [st.input_ref(store, model)]
    assert [*plan.notes([planned])] == [f"tune: backbone @production: pretrain {model.key[:12]}"]
    boxes = st.commit(store, model.model_copy(update={"job": "detect", "kind": "detector", "key": "d"}))
    st.move_alias(store, "production", st.input_ref(store, boxes), 1, "person")
    with pytest.raises(RecipeError, match=r"stages\.tune\.backbone: @production names a detector; expected a model"):
        named_models(store, tuned, stages)


def test_another_shape_is_refused_before_training_with_two_ways_out(store: Store) -> None:
    run = runs.start_run(store, recipe(), TARGETS)
    commit_planned(store, planned_in(store, run, "digits"), run.id)
    planned = planned_in(store, run)
    contract = contract_for(ViTConfig(image_size=8, patch_size=4, width=16, depth=1, num_heads=2, mlp_dim=64))
    assert planned.key is not None
    with store.staging(st.Layout.files("pretrain", planned.key, 1)) as staging:
        (staging.path / "config.json").write_text(contract.model_dump_json())
    commit_planned(store, planned, run.id, files=staging.files)
    end_run(store, run.id, "SUCCEEDED")
    wide = recipe(model=SIZE | {"width": 32})
    said = r"stages\.pretrain\.init_from: .*width is 16 .*, 32 .*--set pretrain\.init_from=null"
    with pytest.raises(RecipeError, match=said):
        plan.plan_pipeline(store, wide, TARGETS)
    anew = recipe(model=SIZE | {"width": 32}, init_from=None)
    assert start_of(train(store, anew)) == []
    assert start_of(train(store, recipe(model=SIZE | {"width": 32}, steps=21))) != []


def test_the_members_of_a_matrix_continue_themselves(store: Store) -> None:
    raw = recipe().model_dump(mode="json")
    seeds = {f"pretrain@seed={seed}": raw["stages"]["pretrain"] | {"seed": seed} for seed in (0, 1)}
    pipeline = parse_pipeline({"name": "nightly", "stages": {"digits": raw["stages"]["digits"]} | seeds}, "test")
    run = runs.start_run(store, pipeline, tuple(pipeline.stages))
    for name in ("digits", *seeds):
        planned = plan.plan_pipeline(store, pipeline, pipeline.order(), latest=run.latest)
        commit_planned(store, next(stage for stage in planned if stage.name == name), run.id)
    found = named_models(store, pipeline, pipeline.order()).models
    made = {manifest.stage: manifest.key for manifest in st.all_manifests(store, "pretrain")}
    assert {name: reference and reference.key for name, reference in found.items()} == made
    assert len({*made.values()}) == 2
