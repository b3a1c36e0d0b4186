"""The way back from a result to its sources is whole, tells what has changed since, and survives hostile names."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.results.lineage import as_json, as_text, trace
from pipelines.results.lookup import find_artifact, find_run
from pipelines.spec import RecipeError
from pipelines.store import (
    Layout,
    Manifest,
    Store,
    add_event,
    commit,
    create_run,
    input_ref,
    open_store,
    replace_artifact,
)
from tests.support.records import make_manifest, make_plan
from tests.support.scores import compare

RUN = "p-20260101-000000-0000"
HOSTILE = 'a"; evil [label="\\N\x1b[31m\n]'


def made(store: Store, job: str, key: str, stage: str, **inputs: Manifest) -> Manifest:
    references = {field: [input_ref(store, manifest)] for field, manifest in inputs.items()}
    ingest = {"source": f"fingerprint-{key}", "config": {"source": {"kind": "folder", "root": HOSTILE}}}
    fields = {"key": key * 32, "content_digest": f"content-{key}", "stage": stage, "inputs": references}
    fields |= {"code": {"git": "f" * 40, "dirty": True, "digest": "c" * 64}}
    return commit(store, make_manifest(job, **fields, **(ingest if job == "ingest" else {})))


@pytest.fixture
def run(store: Store) -> list[Manifest]:
    """Two datasets; pretraining on one, evaluation of it on the other, baselines on the other; a report of some."""
    glyphs, digits = made(store, "ingest", "aa", "glyphs"), made(store, "ingest", "ab", HOSTILE)
    pretrain = made(store, "pretrain", "b1", "pretrain", data=glyphs)
    probe = made(store, "evaluate", "c1", "probe", data=digits, backbone=pretrain)
    pixels = made(store, "baselines", "d1", "pixels", data=digits)
    report = make_manifest(
        "report",
        key="e1" * 32,
        content_digest="content-e1",
        stage="report",
        inputs={"of": [input_ref(store, digits), input_ref(store, probe)]},
    )
    everything = [glyphs, digits, pretrain, probe, pixels, commit(store, report)]
    jobs = {manifest.stage: manifest.job for manifest in everything}
    create_run(store, RUN, make_plan(RUN, *jobs, "later", jobs=jobs))
    for manifest in everything:
        add_event(store, RUN, "stage", stage=manifest.stage, status="SUCCEEDED", key=manifest.key)
    return everything


def test_a_report_leads_back_to_every_source(store: Store, run: list[Manifest]) -> None:
    glyphs, digits, pretrain, probe, pixels, report = run
    found = as_json(trace(store, "e1e1"))
    assert json.loads(json.dumps(found)) == found
    assert found["roots"] == [report.key]
    nodes = {node["key"]: node for node in found["nodes"]}
    assert nodes.keys() == {manifest.key for manifest in run} - {pixels.key}
    assert {node["source"] for node in found["nodes"]} == {None, "fingerprint-aa", "fingerprint-ab"}
    edges = {(edge["consumer"], edge["field"], edge["input"], edge["state"]) for edge in found["edges"]}
    assert edges == {
        (report.key, "of", digits.key, "same"),
        (report.key, "of", probe.key, "same"),
        (probe.key, "data", digits.key, "same"),
        (probe.key, "backbone", pretrain.key, "same"),
        (pretrain.key, "data", glyphs.key, "same"),
    }


def test_a_run_means_what_no_other_of_it_takes(store: Store, run: list[Manifest]) -> None:
    *_, probe, pixels, report = run
    assert set(trace(store, "p").roots) == {pixels.key, report.key}
    assert trace(store, "p/probe").roots == (probe.key,)


def test_a_stage_means_the_newest_run_that_has_its_result(store: Store, run: list[Manifest]) -> None:
    *_, probe, pixels, _ = run
    stopped = "p-20260102-000000-0000"
    for newer in (stopped, "p_large-20260103-000000-0000", "p_small-20260104-000000-0000"):
        jobs = {"probe": "baselines", "pixels": "baselines"}
        create_run(store, newer, make_plan(newer, *jobs, jobs=jobs))
    add_event(store, stopped, "stage", stage="probe", status="RUNNING", key="0" * 64)
    assert trace(store, "p/probe").roots == (probe.key,)
    add_event(store, stopped, "stage", stage="probe", status="SUCCEEDED", key=pixels.key)
    assert trace(store, "p/probe").roots == (pixels.key,)
    assert trace(store, f"{RUN}/probe").roots == (probe.key,), "a whole id is one run"
    assert find_run(store, "p") == stopped
    with pytest.raises(RecipeError, match="no committed results yet"):
        trace(store, "p_l/probe")
    with pytest.raises(RecipeError, match="'p_' is ambiguous; it matches the runs p_large"):
        trace(store, "p_/probe")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("zz", "no artifact has a key that begins with 'zz', and no run matches 'zz'"),
        ("p/prob", "no stage is called 'prob'"),
        ("p/later", "no committed results yet"),
    ],
)
def test_what_means_nothing_is_told(store: Store, run: list[Manifest], given: str, message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        trace(store, given)


def test_a_prefix_is_unique_among_the_keys_of_all_jobs(tmp_path: Path) -> None:
    store, common = open_store(str(tmp_path)), "a" * 11
    for job, last in (("ingest", "b"), ("report", "c")):
        commit(store, make_manifest(job, key=f"{common}{last}{'0' * 52}"))
    with pytest.raises(RecipeError, match="is ambiguous; it matches the keys"):
        trace(store, common)
    assert [trace(store, common + last).roots[0][11] for last in "bc"] == ["b", "c"]


def test_what_is_not_made_yet_is_no_wrong_name(store: Store, run: list[Manifest]) -> None:
    with pytest.raises(RecipeError, match="p/later: no committed results yet; `vitflow status` shows"):
        compare(store, "p/later", "p/probe")
    with pytest.raises(RecipeError, match="no audit found; there are none yet; `vitflow status` shows"):
        find_artifact(store, None, "audit")


def test_text_shows_each_artifact_once_and_no_control_characters(store: Store, run: list[Manifest]) -> None:
    lines = list(as_text(trace(store, "p")))
    assert all(line.isprintable() for line in lines)
    for manifest in run:
        whole = [line for line in lines if manifest.key[:12] in line and "(above)" not in line]
        assert len(whole) == 1, manifest.stage
    assert sum("(above)" in line for line in lines) == 2, "digits, in probe and in pixels"
    assert sum("fingerprint-a" in line for line in lines) == 2
    assert "by u, code ffffffffffff with changes" in "\n".join(lines)


def test_an_input_that_was_made_again_is_told(store: Store, run: list[Manifest]) -> None:
    glyphs, digits, pretrain, *_ = run
    root = Path(store.uri)
    for manifest, digest in ((glyphs, glyphs.content_digest), (digits, "other")):
        (root / Layout.manifest("ingest", manifest.key)).unlink()
        commit(store, manifest.model_copy(update={"content_digest": digest, "nonce": "again"}))
    (root / Layout.manifest("pretrain", pretrain.key)).unlink()
    found = trace(store, "e1")
    assert {edge.input: edge.state for edge in found.edges if edge.input != run[3].key} == {
        digits.key: "other content",
        pretrain.key: "gone",
    }
    text = "\n".join(as_text(found))
    assert "b1b1b1b1b1b1, content content-b1  (gone" in text
    assert text.count("OTHER content") == 2
    commit(store, pretrain)
    assert {edge.input: edge.state for edge in trace(store, "e1").edges}[glyphs.key] == "made again"


def test_what_force_has_replaced_is_told(store: Store, run: list[Manifest]) -> None:
    replace_artifact(store, "pretrain", run[2].key, "9" * 64, "r", "--force")
    assert "replaced since by 999999999999" in "\n".join(as_text(trace(store, "e1")))


def test_the_checkpoint_that_a_stage_used_is_told(store: Store, run: list[Manifest]) -> None:
    config = {"backbone": {"stage": "pretrain", "checkpoint": "step:5"}}
    inputs = {"backbone": [input_ref(store, run[2])]}
    commit(store, make_manifest("evaluate", key="c9" * 32, stage="early", config=config, inputs=inputs))
    found = trace(store, "c9")
    assert {edge.field: edge.checkpoint for edge in found.edges} == {"backbone": "step:5", "data": None}
    assert "└─ backbone (step:5): pretrain  pretrain b1" in "\n".join(as_text(found))


def test_the_command_line(store: Store, run: list[Manifest]) -> None:
    def said(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["lineage", "p", "--store", store.uri, *arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    found = trace(store, "p")
    assert json.loads(said("--json")) == as_json(found)
    assert said().splitlines() == list(as_text(found))
