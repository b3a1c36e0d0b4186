"""The driver against a cluster that commits at once and a store whose every answer fails to come the first time."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

import pipelines.store
from pipelines.cluster.jobs_client import JobState
from pipelines.commands import running
from pipelines.engine import driver, runs
from pipelines.engine.plan import PlannedStage
from pipelines.recipe.load import parse_pipeline
from pipelines.recipe.pipeline import Pipeline
from pipelines.store import Layout, Store, StoreUnreachable, all_manifests, commit
from pipelines.store.folder import FolderStore
from tests.support.records import make_manifest

REPORT = {
    "title": "Some", "question": "Which?", "headline": "This one.", "note": "", "accuracies": [], "verdicts": [],
}  # fmt: skip


def pipeline(images: Path) -> Pipeline:
    """One image to ingest, and a report on it."""
    (images / "train" / "a").mkdir(parents=True)
    (images / "train" / "a" / "1.png").write_bytes(b"as good as an image here")
    ingest = {"job": "ingest", "source": {"kind": "folder", "root": str(images)}}
    report = {"job": "report", "title": "Some", "of": ["images"]}
    return parse_pipeline({"name": "two", "stages": {"images": ingest, "report": report}}, "test")


class Forgetful(FolderStore):
    """Of each thing that it is asked for, the first answer is lost: what was to be written is there all the same."""

    def __init__(self, root: Path) -> None:
        self.asked: set[tuple[str, str]] = set()
        super().__init__(root)

    def _answer(self, what: str, name: str, answer: Any) -> Any:
        if name != Layout.STORE and (what, name) not in self.asked:
            self.asked.add((what, name))
            raise StoreUnreachable(f"can't {what} {name}")
        return answer

    def read(self, name: str, limit: int | None = None) -> Any:
        return self._answer("read", name, super().read(name, limit))

    def create(self, name: str, data: bytes) -> Any:
        # an event has a new name at each try: these are told apart by their stage and status
        name_, what = name, json.loads(data) if "/events/" in name else {}
        if what:
            name_ = f"{what['event']} {what.get('stage')} {what.get('status')}"
        return self._answer("create", name_, super().create(name, data))

    def names(self, folder: str) -> Any:
        return self._answer("list", folder, super().names(folder))

    def local(self, folder: str, files: Any) -> Any:
        return self._answer("fetch", folder, super().local(folder, files))


@dataclass
class Committing:
    """A cluster, and the connection to it, whose jobs have committed, or ended with this exit code, by the time that
    somebody asks."""

    store: Store
    code: int = 0
    source: Path | None = None  # is removed by the first job
    damages: int = 0  # this many of the first manifests are damaged before anybody reads them
    address: str = "http://127.0.0.1:1"
    session_name: str = "session"

    def __post_init__(self) -> None:
        self.submitted: list[str] = []

    def cluster(self) -> Any:
        return self

    def keep(self) -> None:
        pass

    def submit(self, submission_id: str, command: str, *_: object) -> None:
        assert submission_id not in self.submitted
        self.submitted.append(submission_id)
        if self.source is not None and self.source.exists():
            shutil.rmtree(self.source)
        if self.code:
            return
        job, key = Path(command.rpartition(" ")[2]).parts[-5:-3]
        with self.store.staging(Layout.files(job, key, 1)) as staging:
            if job == "report":
                (staging.path / "report.json").write_text(json.dumps(REPORT))
        commit(self.store, make_manifest(job, key=key, stage=job, files=staging.files))
        if len(self.submitted) <= self.damages:
            Path(self.store.uri, Layout.manifest(job, key)).write_text("{")

    def job(self, submission_id: str) -> JobState | None:
        if submission_id not in self.submitted:
            return None
        status = "FAILED" if self.code else "SUCCEEDED"
        return JobState(submission_id, status, "", self.code)

    def logs(self, submission_id: str) -> str:
        return f"error: {submission_id} said so\n" if self.code else "fine\n"

    def follow_logs(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UNREACHABLE_SECONDS", "POLL_SECONDS", "ASK_SECONDS"):
        monkeypatch.setattr(driver, name, 0.0)
    monkeypatch.setattr(pipelines.store, "UNREACHABLE_SECONDS", 0.0)


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "s")


@pytest.fixture
def run(store: FolderStore, tmp_path: Path) -> runs.Run:
    return runs.start_run(store, pipeline(tmp_path / "images"), ("images", "report"))


def drive(store: Store, run: runs.Run, connection: Committing) -> list[PlannedStage]:
    return running._drive(store, run, nullcontext(connection), 2, "vitflow run two")


def test_a_store_that_loses_every_answer_once_changes_nothing_about_a_run(
    store: FolderStore, run: runs.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that a driver asks of the store is asked again: also what it reads when the run is over."""
    connection = Committing(store)
    made = drive(Forgetful(store.root), run, connection)
    assert [stage.state for stage in made] == ["cached", "cached"]
    assert {manifest.job for manifest in all_manifests(store)} == {"ingest", "report"}
    assert len(connection.submitted) == 2
    assert runs.run_status(store, run.id)["status"] == "SUCCEEDED"
    said = capsys.readouterr().out
    assert said.count("Which? This one.") == 1, "the report is shown, once"
    assert "waiting for the store: can't fetch" in said, "it was asked for after the walk"


def test_a_source_that_goes_during_a_run_does_not_undo_what_was_made_of_it(
    store: FolderStore, run: runs.Run, tmp_path: Path
) -> None:
    made = drive(store, run, Committing(store, source=tmp_path / "images"))
    assert not (tmp_path / "images").exists()
    assert [stage.manifest and stage.manifest.job for stage in made] == ["ingest", "report"]


def test_a_stage_that_ends_with_2_fails_its_run_with_1(
    store: FolderStore, run: runs.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    connection = Committing(store, code=2)
    with pytest.raises(typer.Exit) as ended:
        drive(store, run, connection)
    assert ended.value.exit_code == 1
    assert len(connection.submitted) == 1, "a mistake of the user's is not tried again"
    assert "said so" in capsys.readouterr().out


def test_a_manifest_that_is_damaged_while_its_stage_is_followed_fails_that_stage_alone(
    store: FolderStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = pipeline(tmp_path / "images").model_dump(mode="json")["stages"]
    both = {"name": "both", "stages": {"small": stages["images"] | {"short_side": 32}, **stages}}
    run = runs.start_run(store, parse_pipeline(both, "test"), ("small", "images", "report"))
    with pytest.raises(typer.Exit) as ended:
        drive(store, run, Committing(store, damages=1))
    assert ended.value.exit_code == 1
    statuses = {stage["stage"]: stage["status"] for stage in runs.run_status(store, run.id)["stages"]}
    assert statuses == {"small": "FAILED", "images": "SUCCEEDED", "report": "SUCCEEDED"}
    assert "manifest.json is damaged" in capsys.readouterr().out
