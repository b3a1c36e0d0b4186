"""What a plan says of a store, and that looking changes nothing."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines import plan, runs
from pipelines import store as st
from pipelines.identity import code_digest, source_fingerprint
from pipelines.plan import PlannedStage
from pipelines.recipe import load_pipeline
from pipelines.spec import Ingest, Pipeline
from pipelines.store import Manifest, Store, open_store
from tests.records import make_manifest

TINY = Path(__file__).parent.parent / "tiny.yaml"


@pytest.fixture
def pipeline() -> Pipeline:
    return load_pipeline(str(TINY))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def make(store: Store, planned: PlannedStage, content: str = "", code: str | None = None) -> Manifest:
    """Commit an artifact for a planned stage, as its job would."""
    assert planned.key is not None
    assert planned.inputs is not None
    config = planned.config
    return st.commit(
        store,
        make_manifest(
            config.job,
            key=planned.key,
            nonce=planned.key,
            stage=planned.name,
            content_digest=hashlib.sha256(f"{planned.name}{content}".encode()).hexdigest(),
            inputs=planned.inputs,
            config=config.model_dump(mode="json"),
            source=planned.source,
            code={"version": config.VERSION, "digest": code or code_digest(config.job), "git": "a" * 40},
        ),
    )


def make_all(store: Store, pipeline: Pipeline) -> dict[str, Manifest]:
    made: dict[str, Manifest] = {}
    for name in pipeline.order():
        made[name] = make(store, plan.plan_stage(store, name, pipeline.stages[name], made))
    return made


def states(store: Store, pipeline: Pipeline) -> dict[str, str]:
    return {stage.name: stage.state for stage in plan.plan_pipeline(store, pipeline, pipeline.order())}


def test_everything_made_is_cached_and_planning_writes_nothing(store: Store, pipeline: Pipeline) -> None:
    make_all(store, pipeline)
    before = sorted(store.root.rglob("*"))
    assert set(states(store, pipeline).values()) == {"cached"}
    assert sorted(store.root.rglob("*")) == before


def test_a_change_reaches_what_is_behind_it_and_nothing_else(store: Store, pipeline: Pipeline) -> None:
    make_all(store, pipeline)
    changed = load_pipeline(str(TINY), ("pretrain.steps=21",))
    found = states(store, changed)
    assert {name for name, state in found.items() if state == "cached"} == {"digits", "pixels"}
    (stage,) = [s for s in plan.plan_pipeline(store, changed, changed.order()) if s.name == "pretrain"]
    assert plan.reason(store, stage) == "steps 20 -> 21"


def test_code_that_changed_since_is_told_and_stays_cached(store: Store, pipeline: Pipeline) -> None:
    planned = plan.plan_stage(store, "digits", pipeline.stages["digits"], {})
    make(store, planned, code="0" * 64)
    stage = plan.plan_stage(store, "digits", pipeline.stages["digits"], {})
    assert stage.state == "cached"
    (note,) = plan.notes(store, stage)
    assert note.startswith("digits: its code has changed since (it was made at aaaaaaaaaa)")


def test_force_replaces_once_for_a_run_and_again_for_another(store: Store, pipeline: Pipeline) -> None:
    make_all(store, pipeline)

    def planned() -> PlannedStage:
        return plan.plan_stage(store, "digits", pipeline.stages["digits"], {})

    first = planned()
    successor = plan.force_stage(store, first, "nonce of a run", "run")
    assert successor != first.key
    assert plan.force_stage(store, planned(), "nonce of a run", "run") == successor, (
        "a continued run finds its own"
    )
    assert planned().key == first.key, "what was there stands until its successor is made"
    make(store, replace(first, key=successor))
    assert planned().key == successor
    second = plan.force_stage(store, planned(), "nonce of another", "run")
    assert second not in (first.key, successor)


def test_force_of_what_was_never_made_just_makes_it(store: Store, pipeline: Pipeline) -> None:
    stage = plan.plan_stage(store, "digits", pipeline.stages["digits"], {})
    assert plan.force_stage(store, stage, "nonce", "run") == stage.key


def test_the_same_content_made_again_stops_there_and_is_told(store: Store, pipeline: Pipeline) -> None:
    make_all(store, pipeline)
    stage = plan.plan_stage(store, "digits", pipeline.stages["digits"], {})
    again = make(store, replace(stage, key=plan.force_stage(store, stage, "nonce", "run")))
    pixels = plan.plan_stage(store, "pixels", pipeline.stages["pixels"], {"digits": again})
    assert pixels.state == "cached"
    assert any("with the same content, so this stands" in note for note in plan.notes(store, pixels))


def test_other_content_made_again_runs_what_is_behind_it(store: Store, pipeline: Pipeline) -> None:
    make_all(store, pipeline)
    stage = plan.plan_stage(store, "digits", pipeline.stages["digits"], {})
    again = make(store, replace(stage, key=plan.force_stage(store, stage, "nonce", "run")), content="other")
    pixels = plan.plan_stage(store, "pixels", pipeline.stages["pixels"], {"digits": again})
    assert pixels.state == "run"
    assert plan.reason(store, pixels) == "data has changed"


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
    st.wish_stop(store, first.id)
    assert runs.start_run(store, pipeline, targets, ()).id != first.id
    st.add_event(store, other.id, "finished", status="FAILED")
    assert runs.run_status(store, other.id)["status"] == "FAILED"
    assert runs.run_status(store, first.id)["status"] == "STOPPED"


def test_a_run_without_its_driver_is_shown_as_unfinished(store: Store, pipeline: Pipeline) -> None:
    run = runs.start_run(store, pipeline, tuple(pipeline.stages), ())
    assert runs.run_status(store, run.id)["status"] == "UNFINISHED"
    st.add_event(store, run.id, "driver", **runs.this_process())
    assert runs.run_status(store, run.id)["status"] == "RUNNING"


def test_a_run_without_a_plan_is_none_and_an_old_recipe_can_still_be_shown(
    store: Store, pipeline: Pipeline
) -> None:
    run = runs.start_run(store, pipeline, tuple(pipeline.stages), ())
    (store.root / "runs" / "tiny-20200101-000000-abcd").mkdir()
    assert runs.runs(store) == [run.id]
    record = json.loads((store.root / "runs" / run.id / "plan.json").read_text())
    record["pipeline"]["stages"]["digits"]["a field of long ago"] = 1
    (store.root / "runs" / run.id / "plan.json").write_text(json.dumps(record))
    assert len(runs.run_status(store, run.id)["stages"]) == len(pipeline.stages)


def test_a_folder_is_known_by_its_images_not_by_what_is_hidden_in_it(tmp_path: Path) -> None:
    source = Ingest.model_validate(
        {"job": "ingest", "source": {"kind": "folder", "root": str(tmp_path / "images")}}
    )
    (tmp_path / "images" / "a").mkdir(parents=True)
    (tmp_path / "images" / "a" / "1.png").write_bytes(b"1")
    before = source_fingerprint(source)
    (tmp_path / "images" / ".git").mkdir()
    (tmp_path / "images" / ".git" / "HEAD").write_text("x")
    assert source_fingerprint(source) == before
