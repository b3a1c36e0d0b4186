"""What is damaged in a store is named, and affects only what needs it; nothing ends with a traceback or for ever."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from pipelines import store as st
from pipelines.cli import app
from pipelines.engine import plan
from pipelines.engine.driver import Driver
from pipelines.engine.logs import show_logs
from pipelines.engine.runs import Run, load_run, run_status, start_run
from pipelines.engine.submission import reached
from pipelines.identity import sha256, stage_key, successor_key
from pipelines.recipe.load import load_pipeline
from pipelines.results import accuracies, listing
from pipelines.results.lineage import as_json, as_text, trace
from pipelines.results.lookup import find_artifact, find_run
from pipelines.results.sql.query import query
from pipelines.results.verify import verify
from pipelines.spec import RecipeError
from pipelines.store import (
    FileEntry,
    Layout,
    Manifest,
    StoreAbsent,
    StoreDamaged,
    StoreError,
    file_checks,
    local_files,
)
from pipelines.store.file_checks import fault
from pipelines.store.folder import FolderStore
from ray_jobs.evaluation.rows import ROWS, write_table
from ray_jobs.ingesting.reuse import FACTS, Finished, find_reusable, finished_parts, write_facts
from ray_jobs.sources.archives.entries import ENTRIES
from tests.simulation.cluster import Client, Script, SimulatedCluster
from tests.simulation.loop import Loop, Process
from tests.support.paths import TINY
from tests.support.records import flip, make_attempt, make_context, make_manifest, make_plan, row
from tests.support.world import DriverOf, Told

GOOD, BAD = "good-20260101-000000-aaaa", "bad-20260102-000000-bbbb"  # runs
ROW = row()


def put(store: FolderStore, job: str, key: str, stage: str, run: str, **fields: Any) -> Manifest:
    """Commit an artifact that has rows, as a stage of a run."""
    attempt = make_attempt(job, key=(key * 32)[:64], stage=stage, run=run)
    st.create_attempt(store, attempt)
    with store.staging(Layout.files(job, attempt.key, 1)) as staging:
        write_table(staging.path / "rows.parquet", [ROW | {"method": stage}], ROWS)
        (staging.path / "facts").mkdir()
        (staging.path / "facts/00-00000.parquet").write_bytes(b"")
    files = {"files": staging.files, "stage": stage, "run": run}
    st.add_event(store, run, "stage", stage=stage, status="SUCCEEDED", key=attempt.key)
    return st.commit(store, make_manifest(job, key=attempt.key, **files | fields))


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    """Two runs: of one everything is well, of the other an evaluation, an attempt, a plan and an event are there to
    be damaged."""
    store = FolderStore(tmp_path / "store")
    jobs = {"model": "pretrain", "probe": "evaluate", "victim": "evaluate"}
    for run, stages in ((GOOD, ("data", "model", "probe")), (BAD, ("victim",))):
        st.create_run(store, run, make_plan(run, *stages, jobs=jobs))
    pipeline = load_pipeline(str(TINY))
    config, source = pipeline.stages["digits"], "f" * 64
    digits = {"config": config.model_dump(mode="json"), "source": source, "code": {"version": config.version}}
    data = put(store, "ingest", stage_key(config, {}, source), "data", GOOD, **digits)
    taken = {"data": [st.input_ref(store, data)]}
    model = put(store, "pretrain", "ae", "model", GOOD, inputs=taken)
    put(store, "evaluate", "ee", "probe", GOOD, inputs=taken | {"backbone": [st.input_ref(store, model)]})
    put(store, "evaluate", "bb", "victim", BAD, inputs=taken)
    return store


def test_the_logs_of_a_run_whose_artifact_was_removed_leave_it_out(store: FolderStore) -> None:
    shutil.rmtree(store.root / Layout.artifact("pretrain", "ae" * 32))
    said: list[str] = []
    show_logs(store, GOOD, None, False, reached(None, None), said.append)
    assert [line.split()[1] for line in said if line.startswith("---")] == ["data", "probe"]


def test_the_logs_of_a_run_go_on_past_a_damaged_one(store: FolderStore) -> None:
    manifest = st.read_manifest(store, "pretrain", "ae" * 32)
    assert manifest is not None
    (store.root / Layout.attempt("pretrain", manifest.key, 1) / "attempt.json").write_bytes(b"{")
    said: list[str] = []
    with pytest.raises(StoreDamaged, match=r"attempt\.json is damaged"):
        show_logs(store, GOOD, None, False, reached(None, None), said.append)
    assert [line.split()[1] for line in said if line.startswith("---")] == ["data", "probe"]


@pytest.mark.parametrize("source", [5, None, {"kind": "vtab"}])
def test_a_source_of_another_version_hides_no_rows(store: FolderStore, source: Any) -> None:
    data = put(store, "ingest", "0d", "odd", GOOD, config={"source": source})
    put(store, "evaluate", "0e", "of_odd", GOOD, inputs={"data": [st.input_ref(store, data)]})
    with query(store, "SELECT vtab_group FROM rows WHERE stage = 'of_odd'") as answer:
        assert list(answer.rows) == [(None,)]


def test_what_is_to_be_verified_may_be_a_key(store: FolderStore) -> None:
    with pytest.raises(RecipeError, match="no artifact has a key that begins with 'xyz', and"):
        verify(store, "xyz")


# ------------------------------------------------------------------------------------------------- one damaged record

VICTIM = Path("artifacts/evaluate", "bb" * 32)
DEEP = b"[" * 100_000


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def changed(**fields: Any) -> Callable[[Path], None]:
    """The victim's manifest with other fields."""

    def damage(root: Path) -> None:
        path = root / VICTIM / "manifest.json"
        write(path, json.dumps(json.loads(path.read_bytes()) | fields).encode())

    return damage


def manifest(data: bytes) -> Callable[[Path], None]:
    return lambda root: write(root / VICTIM / "manifest.json", data)


def huge(root: Path) -> None:
    os.truncate(root / VICTIM / "manifest.json", 60 * 2**20)


def folder_in_its_place(root: Path) -> None:
    (root / VICTIM / "manifest.json").unlink()
    (root / VICTIM / "manifest.json").mkdir()


def pipe_in_its_place(root: Path) -> None:
    (root / VICTIM / "manifest.json").unlink()
    os.mkfifo(root / VICTIM / "manifest.json")


DAMAGED_MANIFESTS: dict[str, Callable[[Path], None]] = {
    "empty": manifest(b""),
    "a list": manifest(b"[]"),
    "half": manifest(b'{"job": "evaluate", "key'),
    "not UTF-8": manifest(b"\xff\xfe{}"),
    "deeply nested": manifest(DEEP),
    "deep in a field": changed(config=json.loads("[" * 300 + "]" * 300)),
    "60 MB": huge,
    "a folder": folder_in_its_place,
    "a pipe": pipe_in_its_place,
    "of another key": changed(key="ee" * 32),
    "of another job": changed(job="baselines"),
    "a time that is none": changed(finished="yesterday"),
    "an input outside": changed(
        inputs={"data": [{"job": "../..", "key": "x", "content_digest": "", "manifest_sha256": ""}]}
    ),
}


def ask(store: FolderStore, sql: str) -> list[Any]:
    with query(store, sql) as answer:
        return list(answer.rows)


def planned(store: FolderStore) -> Any:
    stages = plan.plan_pipeline(store, pipeline := load_pipeline(str(TINY)), pipeline.order())
    return [stage.state for stage in stages], plan.reasons(stages, plan.previous_results(store, "tiny", stages))


def known_parts(store: FolderStore) -> list[Finished]:
    """What an ingest of the digits would not read again."""
    context = make_context(store, load_pipeline(str(TINY)).stages["digits"])
    key = stage_key(context.config, {}, context.attempt.source)
    digests = pa.chunked_array([["digest of a file"]])
    return finished_parts(replace(context, attempt=context.attempt.model_copy(update={"key": key})), digests)


COMMANDS: dict[str, Callable[[FolderStore], Any]] = {
    "list": lambda store: {kind: listing.list_kind(store, kind) for kind in listing.KINDS},
    "lineage": lambda store: as_json(trace(store, "ee")),
    "lineage of a run": lambda store: list(as_text(trace(store, GOOD))),
    "a model": lambda store: find_artifact(store, f"{GOOD}/model", "model").key,
    "query": lambda store: ask(store, "SELECT method, artifact FROM rows JOIN artifacts USING (artifact) ORDER BY 1"),
    "report list": lambda store: accuracies.list_results(store, "digits", None, None),
    "plan": planned,
    "ingest": known_parts,
}
READ_ONLY_WHAT_THEY_NEED = {"lineage", "lineage of a run", "a model", "plan", "ingest"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "command"),
    [*((damage, "list") for damage in DAMAGED_MANIFESTS), *(("half", command) for command in COMMANDS)],
)
def test_a_damaged_manifest_is_named_and_hides_nothing_else(
    store: FolderStore, capsys: pytest.CaptureFixture[str], damage: str, command: str
) -> None:
    shutil.copytree(store.root, whole := store.root.with_name("whole"))
    shutil.rmtree(whole / VICTIM)
    DAMAGED_MANIFESTS[damage](store.root)
    expected = json.dumps(COMMANDS[command](FolderStore(whole)), default=str)
    assert json.dumps(COMMANDS[command](store), default=str) == expected.replace(str(whole), store.uri)
    said = capsys.readouterr().err.count(f"{VICTIM}/manifest.json is damaged")
    assert said == (command not in READ_ONLY_WHAT_THEY_NEED)


@pytest.mark.parametrize("damage", DAMAGED_MANIFESTS)
def test_verify_names_a_damaged_manifest_and_what_rebuilds_it(store: FolderStore, damage: str) -> None:
    DAMAGED_MANIFESTS[damage](store.root)
    (found,) = verify(store).damage
    assert found.name == f"{VICTIM}/manifest.json"
    assert found.do == f"vitflow run bad --force victim --store {store.uri}"
    assert verify(store, "bb").damage == verify(store, f"{BAD}/victim").damage == (found,)
    assert not verify(store, GOOD).damage


def test_an_artifact_copied_under_another_job_counts_once(store: FolderStore) -> None:
    shutil.copytree(store.root / VICTIM, store.root / "artifacts/baselines" / VICTIM.name)
    assert ask(store, "SELECT count(*) FROM rows WHERE method = 'victim'") == [(1,)]
    assert len(listing.list_kind(store, "evaluations")) == 2


RUN_DAMAGE: dict[str, bytes] = {
    "empty": b"",
    "a list": b"[]",
    "an object": b"{}",
    "deeply nested": DEEP,
    "another run's": json.dumps(make_plan(GOOD, "victim")).encode(),
}


@pytest.mark.parametrize("damage", RUN_DAMAGE)
def test_a_damaged_plan_hides_its_own_run_alone(
    store: FolderStore, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    write(store.root / "runs" / BAD / "plan.json", RUN_DAMAGE[damage])
    assert [row["run"] for row in listing.list_kind(store, "runs")] == [GOOD]
    assert find_run(store, None) == GOOD
    assert ask(store, "SELECT run FROM runs") == [(GOOD,)]
    assert capsys.readouterr().err.count(f"runs/{BAD}/plan.json is damaged") == 1
    with pytest.raises(StoreDamaged, match=f"runs/{BAD}/plan.json is damaged"):
        load_run(store, BAD)
    assert [found.name for found in verify(store).damage] == [f"runs/{BAD}/plan.json"]


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", DEEP, b'{"event": "stage", "time": "2026-01-01"}', b'{"event": "x", "time": "?"}'],
)
def test_a_damaged_event_hides_itself_alone(
    store: FolderStore, capsys: pytest.CaptureFixture[str], data: bytes
) -> None:
    name = f"runs/{BAD}/events/0.json"
    write(store.root / name, data)
    (stage,) = run_status(store, BAD)["stages"]
    assert stage["status"] == "SUCCEEDED"
    assert capsys.readouterr().err.count(f"{name} is damaged") == 1
    assert [found.name for found in verify(store).damage] == [name]


@pytest.mark.parametrize("name", ["x", "-1", "0", "007", "²", "١", "9" * 200, "1.5", " 1"])
def test_folders_that_are_no_attempts_are_passed_over(store: FolderStore, name: str) -> None:
    (store.root / VICTIM / "attempts" / name).mkdir()
    (store.root / "schedules/often" / f"{name}.json").mkdir(parents=True)
    last = st.last_attempt(store, "evaluate", "bb" * 32)
    assert last is not None
    assert last.number == 1
    assert st.numbers(store, "schedules/often") == []


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", DEEP, st.encode(make_attempt("evaluate", key="ee" * 32))])
def test_a_damaged_attempt_is_named(store: FolderStore, data: bytes) -> None:
    write(store.root / VICTIM / "attempts/1/attempt.json", data)
    with pytest.raises(StoreDamaged, match=r"attempts/1/attempt.json is damaged"):
        st.last_attempt(store, "evaluate", "bb" * 32)


# ------------------------------------------------------------------------------------------------- a plan's own


def test_a_damaged_stage_is_made_again_by_force_alone(store: FolderStore) -> None:
    pipeline = load_pipeline(str(TINY))
    digits = plan.plan_stage(store, "digits", pipeline.stages["digits"], {})
    made = make_manifest("ingest", key=digits.key, source=digits.source, config=digits.config.model_dump())
    st.commit(store, made)
    write(store.root / Layout.manifest("ingest", made.key), b"[]")
    stages = plan.plan_pipeline(store, pipeline, pipeline.order())
    assert [stage.state for stage in stages] == ["damaged"] + ["pending"] * 5
    assert "`--force digits` rebuilds it" in plan.reasons(stages, {})["digits"]
    key = plan.force_stage(store, stages[0], "nonce", "run")
    assert key != made.key
    st.commit(store, made.model_copy(update={"key": key}))
    assert plan.plan_stage(store, "digits", pipeline.stages["digits"], {}).state == "cached"


def test_a_file_of_another_size_or_gone_is_seen_by_the_plan(store: FolderStore) -> None:
    config = load_pipeline(str(TINY)).stages["digits"]
    key = plan.plan_stage(store, "digits", config, {}).key
    assert key is not None
    with store.staging(Layout.files("ingest", key, 1)) as staging:
        (staging.path / "index.parquet").write_bytes(b"1234")
    st.commit(store, make_manifest("ingest", key=key, files=staging.files))
    path = store.root / Layout.files("ingest", key, 1) / "index.parquet"
    assert plan.plan_stage(store, "digits", config, {}).state == "cached"
    for damage, said in (
        (lambda: os.truncate(path, 3), "has 3 bytes, its manifest says 4"),
        (path.unlink, "cannot be read: No such file"),
    ):
        damage()
        found = plan.plan_stage(store, "digits", config, {})
        assert found.state == "damaged"
        assert f"index.parquet is damaged: it {said}" in str(found.damaged)


@pytest.mark.parametrize(
    "data",
    [
        b"[]",
        DEEP,
        b'{"successor": "../../../x", "run": "", "who": "", "why": "", "time": ""}',
        st.encode({"successor": "bb" * 32, "run": "", "who": "", "why": "", "time": ""}),
    ],
    ids=["a list", "deep", "outside", "itself"],
)
def test_a_damaged_replacement_is_named_and_ends(store: FolderStore, data: bytes) -> None:
    name = Layout.replaced("evaluate", "bb" * 32)
    write(store.root / name, data)
    with pytest.raises(StoreDamaged, match=f"{name} is damaged.*; remove this file"):
        st.read_current(store, "evaluate", "bb" * 32)
    assert [found.name for found in verify(store).damage] == [name]
    assert as_json(trace(store, "bb"))["roots"] == ["bb" * 32]


def test_lineage_shows_what_is_behind_a_damaged_input_as_far_as_it_goes(store: FolderStore) -> None:
    write(store.root / Layout.manifest("pretrain", "ae" * 32), b"[]")
    text = "\n".join(as_text(trace(store, "ee")))
    assert "its manifest is damaged" in text
    assert "data" in text


# ------------------------------------------------------------------------------------------------- a damaged file


def test_a_files_bytes_are_compared_once_for_each_version_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    digest = file_checks.hashlib.file_digest
    monkeypatch.setattr(file_checks.hashlib, "file_digest", lambda file, name: read.append(1) or digest(file, name))
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    entry = FileEntry(path="x", size=5, sha256=sha256("12345"))
    assert [fault(path, entry) for _ in range(3)] == [None] * 3
    assert len(read) == 1
    flip(path)
    wrong = sha256(path.read_text())[:12]
    assert [fault(path, entry) for _ in range(2)] == [f"has sha256 {wrong}, its manifest says {entry.sha256[:12]}"] * 2
    assert len(read) == 3, "what is damaged is not remembered"
    path.write_bytes(b"123456")
    assert fault(path, entry) == "has 6 bytes, its manifest says 5"
    assert len(read) == 3
    path.unlink()
    assert "No such file" in str(fault(path, entry))


def test_a_damaged_file_is_never_handed_out(store: FolderStore) -> None:
    model = find_artifact(store, "ae", "model")
    path = local_files(store, model) / "rows.parquet"
    flip(path)
    rebuild = f"vitflow run good --force model --store {store.uri}"
    with pytest.raises(StoreDamaged, match=f"rows.parquet is damaged: it has sha256 .*; `{rebuild}` rebuilds it"):
        local_files(store, model)
    (found,) = verify(store).damage
    assert (found.name, found.stage, found.do) == (f"{model.folder}/rows.parquet", "model", rebuild)


def test_of_shards_only_verify_reads_the_bytes(store: FolderStore) -> None:
    """Each image in a shard has a checksum of its own."""
    with store.staging(Layout.files("ingest", "cc", 1)) as staging:
        (staging.path / "shards").mkdir()
        (staging.path / "shards/0.parquet").write_bytes(b"12345")
    made = st.commit(store, make_manifest("ingest", key="cc", files=staging.files))
    flip(local_files(store, made) / "shards/0.parquet")
    shard = local_files(store, made) / "shards/0.parquet"
    assert [found.name for found in verify(store).damage] == [f"{made.folder}/shards/0.parquet"]
    os.truncate(shard, 4)
    with pytest.raises(StoreDamaged, match="has 4 bytes"):
        local_files(store, made)


def test_verify_reads_again_what_was_found_right_before(store: FolderStore) -> None:
    model = find_artifact(store, "ae", "model")
    path = local_files(store, model) / "rows.parquet"
    (entry,) = [file for file in model.files if file.path == path.name]
    flip(path)
    file_checks.remember(path, entry, True)  # as where a disk loses a bit, and no time of the file changes
    assert local_files(store, model)
    assert len(verify(store).damage) == 1
    with pytest.raises(StoreDamaged):
        local_files(store, model)


@pytest.mark.parametrize("is_old", [False, True], ids=["with its own sha256", "from before it had one"])
@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"metrics": {"test_accuracy": 0.91}}, r"it had sha256 \w+ when \w+ .* read it"),
        ({"source": "e" * 64}, "its configuration, inputs and version belong to another key"),
    ],
)
def test_a_manifest_is_not_edited_in_silence(store: FolderStore, changes, what, is_old) -> None:
    data = find_artifact(store, None, "dataset")
    path = store.root / Layout.manifest(data.job, data.key)
    record = json.loads(path.read_bytes()) | changes | ({"own_sha256": None} if is_old else {})
    write(path, json.dumps(record, indent=1).encode() + b"\n")
    damage = [each for each in verify(store, data.key).damage if re.search(what, each.what)]
    if is_old:
        assert [each.stage for each in damage] == ["data"]
        return
    with pytest.raises(StoreDamaged, match="was changed after it was written"):
        st.read_manifest(store, data.job, data.key)


def test_the_key_of_what_force_made_is_that_of_what_it_replaced(store: FolderStore) -> None:
    data = find_artifact(store, None, "dataset")
    following = successor_key(data.key, "nonce")
    st.replace_artifact(store, data.job, data.key, following, GOOD, "--force")
    fields = data.model_dump(include={"config", "source", "code"})
    put(store, data.job, following, "data", GOOD, **fields)
    assert not verify(store).damage
    plan = make_plan("again-20260103-000000-cccc", "data") | {"force": {"data": "nonce"}}
    st.create_run(store, plan["run"], plan)
    put(store, data.job, "0f", "data", plan["run"], **fields)
    found = verify(store)
    assert not found.damage
    assert [each.why for each in found.unchecked if "0f0f" in each.name] == [
        "the artifact that it replaced by --force is gone"
    ]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES])
@pytest.mark.parametrize("what", ["rows.parquet", "manifest.json", "plan.json"])
def test_what_this_process_cannot_read_is_not_damaged(store: FolderStore, monkeypatch, number, what) -> None:
    data, opened = find_artifact(store, None, "dataset"), Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == what:
            raise OSError(number, os.strerror(number))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(StoreError, match=os.strerror(number)) as refused:
        local_files(store, data)
        st.read_manifest(store, data.job, data.key)
        st.read_plan(store, GOOD)
    assert not isinstance(refused.value, StoreDamaged)
    found = verify(store)
    assert not found.damage
    assert {each.name.rpartition("/")[2] for each in found.unread} == {what}
    assert CliRunner().invoke(app, ["verify", "--store", store.uri]).exit_code == 1


def test_a_manifest_names_no_files_outside_its_artifact(store: FolderStore) -> None:
    outside = FileEntry(path="../../../../../store.json", size=1, sha256="")
    with pytest.raises(StoreDamaged, match="outside its artifact"):
        local_files(store, make_manifest(files=(outside,)))


def test_the_command_says_what_is_damaged_and_what_to_do(store: FolderStore) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["verify", *arguments, "--store", store.uri])
        return done.exit_code, done.output

    code, text = run()
    assert (code, text.strip().endswith("nothing is damaged")) == (0, True)
    flip(store.root / Layout.files("evaluate", "bb" * 32, 1) / "rows.parquet")
    code, text = run()
    assert code == 1
    assert "rows.parquet is damaged" in text
    assert "vitflow run bad --force victim" in text
    assert json.loads(run("bb", "--json")[1])["damage"][0]["stage"] == "victim"
    assert run(GOOD)[0] == 0


# ------------------------------------------------------------------------------------------------- a whole run


def driving(store: FolderStore, run: Run, happens: Callable[[], object]) -> tuple[Driver, SimulatedCluster, Told]:
    """A driver on a simulated cluster, whose jobs run until they are stopped; something happens after 3 s."""
    clock = Loop()
    cluster = SimulatedCluster(clock, store, lambda _: Script(running=1e5))  # type: ignore[arg-type]
    clock.after(3.0, happens)
    told = Told(clock)
    driver = DriverOf(store, run, Client(cluster), told, 1)
    driver.environment = Process(clock)
    return driver, cluster, told


def test_a_driver_whose_store_is_deleted_ends_and_makes_no_folder(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    run = start_run(store, load_pipeline(str(TINY)), ("digits",))
    driver, *_ = driving(store, run, lambda: shutil.rmtree(store.root))
    with pytest.raises(StoreAbsent, match="is no longer a store"):
        driver.walk()
    assert not store.root.exists()


@pytest.mark.parametrize("forced", [(), ("digits",)])
def test_a_driver_does_not_repeat_a_damaged_stage_unasked(tmp_path: Path, forced: tuple[str, ...]) -> None:
    store = FolderStore(tmp_path / "store")
    pipeline = load_pipeline(str(TINY))
    digits = plan.plan_stage(store, "digits", pipeline.stages["digits"], {})
    with store.staging(Layout.files("ingest", str(digits.key), 1)) as staging:
        (staging.path / "index.parquet").write_bytes(b"12345")
    made = st.commit(store, make_manifest("ingest", key=digits.key, files=staging.files))
    os.truncate(local_files(store, made) / "index.parquet", 3)
    run = start_run(store, pipeline, ("digits",), forced)
    driver, cluster, told = driving(store, run, lambda: st.request_stop(store, run.id))
    status, _ = driver.walk()
    assert status == {"digits": "STOPPED" if forced else "FAILED"}
    assert ("`--force digits` rebuilds it" in told.of("digits")[-1]) != bool(forced)
    assert bool(cluster.started) == bool(forced)


def test_damaged_facts_of_an_earlier_ingest_are_not_used_again(tmp_path: Path) -> None:
    """They say what an image is whose bytes alone have a checksum."""
    store = FolderStore(tmp_path / "store")
    context = make_context(store, load_pipeline(str(TINY)).stages["digits"])
    entry = {"key": "a.png", "label": 0, "file": "x", "offset": 0, "length": 9}
    entries = pa.Table.from_pylist([entry], schema=ENTRIES).append_column("digest", pa.array(["d"]))
    seen = {"sample_id": "s", "split": "train", "format": "png", "width": 1, "height": 1, "channels": 1}
    seen |= {"content_id": "c", "phash": 7, "shard": 0, "offset": 0, "length": 9, "checksum": 1}
    seen |= {"place": 0, "stored": 9, "digest": "d", "key": "a.png", "label": 0, "file": "x"}
    shard = FileEntry(path="shards/00000.parquet", size=9, sha256="")
    (written,) = write_facts(context, 0, 0, pa.Table.from_pylist([seen], schema=FACTS), shard)
    name = f"{Layout.files('ingest', 'k', 1)}/{written.path}"
    for digest, is_reused in ((written.sha256, True), (None, True), ("0" * 64, False)):
        (found,) = find_reusable(context, [Finished(name, digest)], 0, 0, entries)
        assert (found is not None) == is_reused
