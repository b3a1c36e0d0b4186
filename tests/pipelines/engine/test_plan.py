"""What a plan says of a store, and that looking changes nothing."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines import store as st
from pipelines.cluster.jobs_client import Cluster
from pipelines.engine import plan, runs
from pipelines.engine.durations import last_seconds
from pipelines.engine.history import end_run
from pipelines.engine.plan import PlannedStage
from pipelines.identity import code_digest, sha256, stage_key
from pipelines.recipe.load import load_pipeline, parse_pipeline
from pipelines.recipe.pipeline import Pipeline
from pipelines.results.lookup import find_run
from pipelines.spec import Ingest, RecipeError
from pipelines.store import Manifest, Store
from tests.support.paths import TINY
from tests.support.records import commit_planned, make_plan

RUN = "tiny-20260101-000000-aaaa"


@pytest.fixture
def pipeline() -> Pipeline:
    return load_pipeline(str(TINY))


def make(store: Store, planned: PlannedStage, content: str = "", **fields: Any) -> Manifest:
    """Commit an artifact for a planned stage, whose content is that of its name."""
    plan_of_run = make_plan(RUN) | {"pipeline": load_pipeline(str(TINY)).model_dump(mode="json")}
    st.create_run(store, RUN, plan_of_run | {"stages": [*load_pipeline(str(TINY)).order()]})
    digest = sha256(f"{planned.name}{content}")
    return commit_planned(store, planned, RUN, content_digest=digest, **fields)


def reasons(store: Store, recipe: str, planned: list[PlannedStage], forced: tuple[str, ...] = ()) -> dict[str, str]:
    return plan.reasons(planned, plan.previous_results(store, recipe, planned), forced)


def make_all(store: Store, pipeline: Pipeline, strict_code: bool = False) -> dict[str, Manifest]:
    made: dict[str, Manifest] = {}
    for name in pipeline.order():
        taken = {before: st.input_ref(store, manifest) for before, manifest in made.items()}
        made[name] = make(store, plan.plan_stage(store, name, pipeline.stages[name], taken, strict_code))
    return made


def states(store: Store, pipeline: Pipeline, strict_code: bool = False) -> dict[str, str]:
    planned = plan.plan_pipeline(store, pipeline, pipeline.order(), strict_code)
    return {stage.name: stage.state for stage in planned}


def test_everything_made_is_cached_and_planning_writes_nothing(store: Store, pipeline: Pipeline) -> None:
    make_all(store, pipeline)
    before = sorted(store.root.rglob("*"))
    assert set(states(store, pipeline).values()) == {"cached"}
    assert sorted(store.root.rglob("*")) == before


def test_a_forced_stage_runs_and_what_is_behind_it_waits(store: Store, pipeline: Pipeline) -> None:
    make_all(store, pipeline)
    forced = ("pretrain", "report")
    planned = list(plan.rerun(plan.plan_pipeline(store, pipeline, pipeline.order(), False, forced), forced))
    found = {stage.name: stage.state for stage in planned}
    assert {name for name, state in found.items() if state == "run"} == {"pretrain"}
    assert {name for name, state in found.items() if state == "cached"} == {"digits", "pixels"}
    why = reasons(store, "tiny", planned, forced)
    assert (why["pretrain"], why["report"]) == ("--force", "waits for its inputs")


def test_a_change_reaches_what_is_behind_it_and_nothing_else(store: Store, pipeline: Pipeline) -> None:
    make_all(store, pipeline)
    changed = load_pipeline(str(TINY), ("pretrain.steps=21",))
    found = states(store, changed)
    assert {name for name, state in found.items() if state == "cached"} == {"digits", "pixels"}
    (stage,) = [s for s in plan.plan_pipeline(store, changed, changed.order()) if s.name == "pretrain"]
    assert reasons(store, "tiny", [stage]) == {"pretrain": "steps 20 -> 21"}


def test_a_stage_of_another_recipe_is_no_reason(store: Store, pipeline: Pipeline) -> None:
    make_all(store, pipeline)
    other = parse_pipeline(
        {"name": "other", "stages": {"digits": {"job": "ingest", "source": {"kind": "glyphs"}}}}, "t"
    )
    planned = plan.plan_pipeline(store, other, ("digits",))
    assert reasons(store, "other", planned) == {"digits": "not made in recent runs"}
    assert "source.kind digits -> glyphs" in reasons(store, "tiny", planned)["digits"]


def test_code_that_changed_since_is_told_and_stays_cached(store: Store, pipeline: Pipeline) -> None:
    planned = plan.plan_stage(store, "digits", pipeline.stages["digits"], {})
    make(store, planned, code={"version": planned.config.version, "digest": "0" * 64, "git": "a" * 40})
    stage = plan.plan_stage(store, "digits", pipeline.stages["digits"], {})
    assert stage.state == "cached"
    (note,) = plan.notes([stage])
    assert note == "digits: its code has changed since commit aaaaaaaaaa; `--force digits` reruns it"
    others = [replace(stage, name=f"digits@seed={seed}") for seed in range(9)]
    (note,) = plan.notes([stage, *others])
    assert note.startswith(
        "digits, digits@seed=0, digits@seed=1 and 7 more: their code has changed since commit aaaaaa"
    )


def test_force_replaces_once_for_a_run_and_again_for_another(store: Store, pipeline: Pipeline) -> None:
    make_all(store, pipeline)

    def planned() -> PlannedStage:
        return plan.plan_stage(store, "digits", pipeline.stages["digits"], {})

    first = planned()
    successor = plan.force_stage(store, first, "nonce of a run", "run")
    assert successor != first.key
    assert plan.force_stage(store, planned(), "nonce of a run", "run") == successor, "a continued run finds its own"
    assert planned().key == first.key, "what was there stands until its successor is made"
    make(store, replace(first, key=successor))
    assert planned().key == successor
    second = plan.force_stage(store, planned(), "nonce of another", "run")
    assert second not in (first.key, successor)


def test_force_of_what_was_never_made_just_makes_it(store: Store, pipeline: Pipeline) -> None:
    stage = plan.plan_stage(store, "digits", pipeline.stages["digits"], {})
    assert plan.force_stage(store, stage, "nonce", "run") == stage.key


def test_the_same_content_made_again_stops_there(store: Store, pipeline: Pipeline) -> None:
    make_all(store, pipeline)
    stage = plan.plan_stage(store, "digits", pipeline.stages["digits"], {})
    again = make(store, replace(stage, key=plan.force_stage(store, stage, "nonce", "run")))
    pixels = plan.plan_stage(store, "pixels", pipeline.stages["pixels"], {"digits": st.input_ref(store, again)})
    assert pixels.state == "cached"


def test_other_content_made_again_runs_what_is_behind_it(store: Store, pipeline: Pipeline) -> None:
    make_all(store, pipeline)
    stage = plan.plan_stage(store, "digits", pipeline.stages["digits"], {})
    again = make(store, replace(stage, key=plan.force_stage(store, stage, "nonce", "run")), content="other")
    pixels = plan.plan_stage(store, "pixels", pipeline.stages["pixels"], {"digits": st.input_ref(store, again)})
    assert pixels.state == "run"
    assert reasons(store, "tiny", [pixels]) == {"pixels": "data has changed"}


def test_a_checkpoint_that_the_pretraining_does_not_have_is_told_before_anything_runs(
    store: Store, pipeline: Pipeline
) -> None:
    """It was made with other execution fields, so its key is that of the recipe that keeps the step."""
    made = make_all(store, pipeline)
    for checkpoint, message in (
        (
            "step:5",
            r"stages\.probe\.backbone: .*step:5: .*step:20\b.* 5 in its keep_steps and --force pretrain",
        ),
        ("best", "stages.probe.backbone: checkpoint best: .* has no best step"),
    ):
        settings = ("pretrain.keep_steps=[5]", f"probe.backbone.checkpoint={checkpoint}")
        changed = load_pipeline(str(TINY), settings)
        with pytest.raises(RecipeError, match=message):
            plan.plan_pipeline(store, changed, changed.order())
        forced = plan.plan_pipeline(store, changed, changed.order(), forced=("pretrain",))
        assert [stage.name for stage in forced if stage.state != "cached"] == ["probe", "report"]
    last = load_pipeline(str(TINY), ("probe.backbone.checkpoint=step:20",))
    (probe,) = [one for one in plan.plan_pipeline(store, last, last.order()) if one.name == "probe"]
    assert probe.inputs is not None and probe.inputs["backbone"] == [st.input_ref(store, made["pretrain"])]
    assert reasons(store, "tiny", [probe]) == {"probe": "backbone.checkpoint last -> step:20"}


def test_what_was_made_of_a_checkpoint_stays_cached_without_it(store: Store, pipeline: Pipeline) -> None:
    """Nothing is looked up for a cached stage: its pretraining may have been rerun without that step."""
    made = make_all(store, pipeline)
    changed = load_pipeline(str(TINY), ("pretrain.keep_steps=[5]", "probe.backbone.checkpoint=step:5"))
    taken = {name: st.input_ref(store, manifest) for name, manifest in made.items()}
    config = changed.stages["probe"]
    inputs = {field: [taken[name] for name in names] for field, names in config.inputs().items()}
    key = stage_key(config, {field: [ref.content_digest for ref in refs] for field, refs in inputs.items()}, None)
    make(store, PlannedStage("probe", config, key, inputs=inputs))
    assert states(store, changed)["probe"] == "cached"
    assert plan.plan_stage(store, "probe", pipeline.stages["probe"], taken).state == "cached", "the last, too"


def test_a_plan_reads_two_objects_of_each_stage_whose_key_is_known(
    store: Store, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_all(store, pipeline)
    reads: list[str] = []
    read = store.read
    monkeypatch.setattr(store, "read", lambda name, limit=None: reads.append(name) or read(name, limit))
    planned = plan.plan_pipeline(store, pipeline, pipeline.order())
    assert [stage.name for stage in planned] == list(pipeline.order())
    expected = {st.Layout.manifest(m.job, m.key) for m in made.values()}
    expected |= {st.Layout.replaced(m.job, m.key) for m in made.values()}
    assert sorted(reads) == sorted(expected)
    changed = load_pipeline(str(TINY), ("digits.max_bad_fraction=0.5",))
    reads.clear()
    assert set(states(store, changed).values()) == {"run", "pending"}
    asked = sorted(reads)
    (digits,) = {key for stage in plan.plan_pipeline(store, changed, changed.order()) if (key := stage.key)}
    # what is not made may have been deleted by gc, and then has another key
    assert asked == [st.Layout.manifest("ingest", digits), st.Layout.replaced("ingest", digits)]
    for stage in planned:
        assert stage.manifest is not None
        assert stage.reference == st.input_ref(store, stage.manifest)


def test_a_plan_looks_at_a_source_once(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprints: Counter[str] = Counter()
    whole = plan.identity.source_fingerprint

    def counting(config: Ingest) -> str:
        fingerprints[config.source.kind] += 1
        return whole(config)

    monkeypatch.setattr(plan.identity, "source_fingerprint", counting)
    recipe = tmp_path / "x.yaml"
    recipe.write_text(
        "name: x\nstages:\n  d:\n    job: ingest\n    source: {kind: digits}\n"
        "    matrix: {max_bad_fraction: [0.1, 0.2, 0.3]}\n"
    )
    pipeline = load_pipeline(str(recipe))
    assert len({stage.key for stage in plan.plan_pipeline(store, pipeline, pipeline.order())}) == 3
    assert fingerprints == {"digits": 1}


# ------------------------------------------------------------------------------------------------- --strict-code


def test_strict_code_makes_again_what_other_code_made(
    store: Store, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_all(store, pipeline, strict_code=True)
    assert set(states(store, pipeline, strict_code=True).values()) == {"cached"}
    assert states(store, pipeline)["digits"] == "run", "another key than without"
    (stage, *_) = plan.plan_pipeline(store, pipeline, ("digits",))
    assert reasons(store, "tiny", [stage]) == {"digits": "never made without --strict-code"}
    monkeypatch.setattr(plan.identity, "code_digest", lambda job: "f" * 64 if job == "baselines" else code_digest(job))
    found = states(store, pipeline, strict_code=True)
    assert {name for name, state in found.items() if state != "cached"} == {"pixels", "report"}
    planned = plan.plan_pipeline(store, pipeline, pipeline.order(), strict_code=True)
    assert reasons(store, "tiny", planned)["pixels"] == "its code has changed"
    assert [*plan.notes(planned)] == []


def test_force_under_strict_code_replaces_that_artifact(store: Store, pipeline: Pipeline) -> None:
    make_all(store, pipeline, strict_code=True)
    (stage,) = plan.plan_pipeline(store, pipeline, ("digits",), strict_code=True)
    successor = plan.force_stage(store, stage, "nonce", "run")
    make(store, replace(stage, key=successor))
    (after,) = plan.plan_pipeline(store, pipeline, ("digits",), strict_code=True)
    assert after.key == successor


def test_a_strict_run_is_a_run_of_its_own_and_stays_strict(store: Store, pipeline: Pipeline) -> None:
    targets = tuple(pipeline.stages)
    plain = runs.start_run(store, pipeline, targets)
    strict = runs.start_run(store, pipeline, targets, strict_code=True)
    assert (plain.strict_code, strict.strict_code) == (False, True)
    assert strict.id != plain.id
    again = runs.start_run(store, pipeline, targets, strict_code=True)
    assert (again.id, again.strict_code) == (strict.id, True)
    assert runs.load_run(store, strict.id).strict_code
    assert not runs.load_run(store, plain.id).strict_code


def test_the_same_plan_continues_its_run_until_it_is_over(store: Store, pipeline: Pipeline) -> None:
    targets = tuple(pipeline.stages)
    first = runs.start_run(store, pipeline, targets, ())
    assert not first.continued
    again = runs.start_run(store, pipeline, targets, ())
    assert (again.id, again.continued) == (first.id, True)
    other = runs.start_run(store, load_pipeline(str(TINY), ("pretrain.steps=21",)), targets, ())
    assert other.id != first.id
    forced = runs.start_run(store, pipeline, targets, ("digits",))
    assert forced.id != first.id
    assert runs.start_run(store, pipeline, targets, ("digits",)).force == forced.force, "the same nonce"
    st.request_stop(store, first.id)
    assert runs.start_run(store, pipeline, targets, ()).id != first.id
    end_run(store, other.id, "FAILED")
    assert runs.run_status(store, other.id)["status"] == "FAILED"
    assert runs.run_status(store, first.id)["status"] == "STOPPED"


def test_a_run_without_its_driver_is_shown_as_unfinished(store: Store, pipeline: Pipeline) -> None:
    run = runs.start_run(store, pipeline, tuple(pipeline.stages), ())

    def nobody(address: str) -> Cluster:
        raise AssertionError(f"{address} need not be asked about a process of this machine")

    assert runs.run_status(store, run.id, nobody)["status"] == "UNFINISHED"
    st.add_event(store, run.id, "driver", **runs.driver_process())
    assert runs.run_status(store, run.id, nobody)["status"] == "RUNNING"


def test_a_run_without_a_plan_is_none_and_an_old_recipe_can_still_be_shown(store: Store, pipeline: Pipeline) -> None:
    run = runs.start_run(store, pipeline, tuple(pipeline.stages), ())
    (store.root / "runs" / "tiny-20200101-000000-abcd").mkdir()
    assert find_run(store, "tiny") == run.id
    record = json.loads((store.root / "runs" / run.id / "plan.json").read_text())
    record["pipeline"]["stages"]["digits"]["a field of long ago"] = 1
    (store.root / "runs" / run.id / "plan.json").write_text(json.dumps(record))
    assert len(runs.run_status(store, run.id)["stages"]) == len(pipeline.stages)


def test_the_last_similar_result_says_how_long_a_stage_takes(store: Store, pipeline: Pipeline) -> None:
    make_all(store, pipeline)
    again = load_pipeline(str(TINY), ("pretrain.learning_rate=0.5", "finetune.steps=61"))
    planned = plan.plan_pipeline(store, again, again.order())
    previous = plan.previous_results(store, "tiny", planned)
    previous |= {each.stage: each for each in st.all_manifests(store)}
    found = last_seconds(previous, planned)
    assert set(found) == {*again.stages} - {"finetune"}, "more steps take another time"
    assert found["pretrain"] == previous["pretrain"].seconds
    other = [replace(stage, name=f"other_{stage.name}") for stage in planned]
    found = last_seconds(previous, other)
    assert set(found) == {"other_pretrain"}, "of other stages only trainings with the same work are similar"
