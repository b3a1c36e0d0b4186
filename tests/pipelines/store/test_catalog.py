"""The catalog never changes an answer: it is compared with records that are read one by one, without it."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipelines.engine.history import end_run
from pipelines.engine.runs import all_runs, run_status
from pipelines.errors import StoreDamaged
from pipelines.results.listing import list_kind
from pipelines.store import (
    Layout,
    Manifest,
    Store,
    add_event,
    all_keys,
    all_manifests,
    catalog,
    create_run,
    encode,
    open_store,
    read_manifest,
)
from pipelines.store.folder import FolderStore
from tests.support.records import make_manifest, make_plan
from tests.support.requests import counted
from tests.support.stores import Place

JOBS = ("ingest", "pretrain", "evaluate")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FolderStore:
    """A store in a folder, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = open_store(str(tmp_path / "store"))
    assert isinstance(store, FolderStore)
    return store


def put(store: FolderStore, job: str, key: str, **fields: Any) -> Path:
    """Write a manifest, without the waits of a commit for the disk."""
    path = store.root / Layout.manifest(job, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(encode(make_manifest(job, key=key, **fields)))
    return path


def read_one_by_one(store: Store) -> list[Manifest]:
    found = []
    for job, key in all_keys(store):
        try:
            found.append(read_manifest(store, job, key))
        except StoreDamaged:
            continue
    return sorted((each for each in found if each is not None), key=lambda each: (each.finished, each.job))


def shown(store: Store) -> list[Manifest]:
    found = [*all_manifests(store)]
    assert found == sorted(found, key=lambda each: each.finished)
    return sorted(found, key=lambda each: (each.finished, each.job))


def runs_one_by_one(store: FolderStore) -> dict[str, tuple[str, int, int]]:
    runs = {path.parent.name: run_status(store, path.parent.name) for path in store.root.glob("runs/*/plan.json")}
    return {
        run: (
            status["status"],
            len(status["stages"]),
            [stage["status"] for stage in status["stages"]].count("CACHED"),
        )
        for run, status in runs.items()
    }


def catalog_of(store: Store) -> Path:
    return catalog._path(store)


# ------------------------------------------------------------------------------------------------- what users do


class User:
    """Changes a store, and what lies in its catalog, at random."""

    def __init__(self, store: FolderStore, seed: int) -> None:
        self.store, self.random, self.number = store, random.Random(seed), 0

    def act(self) -> None:
        actions = (
            *(2 * (self.commit,)),
            self.start_run,
            *(2 * (self.event,)),
            *(2 * (self.end_run,)),
            self.remove_the_manifest,
            self.remove_the_artifact,
            self.replace,
            self.damage,
            self.write_over_it,
            self.damage_the_end_of_a_run,
            self.harm_the_catalog,
        )
        self.random.choice(actions)()

    def commit(self) -> None:
        self.number += 1
        put(self.store, self.random.choice(JOBS), f"k{self.number}", metrics={"images": self.number})

    def some(self, pattern: str) -> Path | None:
        found = sorted(self.store.root.glob(pattern))
        return self.random.choice(found) if found else None

    def artifact(self) -> Path | None:
        return self.some("artifacts/*/*/manifest.json")

    def remove_the_manifest(self) -> None:
        if path := self.artifact():
            (path.parent / "attempts" / "1").mkdir(parents=True, exist_ok=True)
            path.unlink()

    def remove_the_artifact(self) -> None:
        if path := self.artifact():
            shutil.rmtree(path.parent)

    def replace(self) -> None:
        if path := self.artifact():
            put(self.store, path.parts[-3], path.parts[-2], metrics={"images": self.random.randrange(10**6)})

    def damage(self) -> None:
        if path := self.artifact():
            data = bytearray(path.read_bytes())
            data[self.random.randrange(len(data))] ^= 1
            path.write_bytes(data + b" ")  # however coarse the clock

    def write_over_it(self) -> None:
        if path := self.artifact():
            path.write_bytes(path.read_bytes()[: self.random.choice((0, 100, 10**6))] + b" ")

    def run(self) -> str | None:
        path = self.some("runs/*/plan.json")
        return path and path.parent.name

    def start_run(self) -> None:
        self.number += 1
        run = f"p-20261126-{self.number:06}-ffff"
        create_run(self.store, run, make_plan(run, "x", "y"))

    def event(self) -> None:
        if run := self.run():
            add_event(self.store, run, "stage", stage="x", status=self.random.choice(("RUNNING", "CACHED")))

    def end_run(self) -> None:
        if run := self.run():
            end_run(self.store, run, self.random.choice(("SUCCEEDED", "FAILED", "STOPPED")))

    def damage_the_end_of_a_run(self) -> None:
        if path := self.some("runs/*/over.json"):
            path.write_bytes(path.read_bytes()[: self.random.choice((10, 10**6))] + b" ")

    def harm_the_catalog(self) -> None:
        path = catalog_of(self.store)
        if not path.exists():
            return
        data = bytearray(path.read_bytes())
        how = self.random.randrange(5)
        if how == 0:
            path.unlink()
        elif how == 1:
            path.write_bytes(data[: self.random.randrange(len(data))])
        else:
            for _ in range(how):
                data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
            path.write_bytes(data)


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_those_of_a_store_that_is_read_one_by_one(
    folder: FolderStore, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)
    user = User(folder, seed)
    for _ in range(170):
        user.act()
        assert shown(folder) == read_one_by_one(folder)
        runs = {run.run: (run.status, run.stages, run.done) for run in all_runs(folder)}
        assert runs == runs_one_by_one(folder)
    assert list(runs) == sorted(runs)
    images = {row["key"]: row["images"] for row in list_kind(folder, "datasets")}
    assert images == {each.key: each.metrics.get("images") for each in read_one_by_one(folder) if each.job == "ingest"}


# ------------------------------------------------------------------------------------------------- what is odd


def test_two_builders_at_once_build_it_without_waiting_in_vain(
    folder: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "_BATCH", 10)
    for number in range(200):
        put(folder, "ingest", f"k{number:03}")
    expected = read_one_by_one(folder)
    with ThreadPoolExecutor(4) as builders:
        answers = [*builders.map(lambda _: shown(folder), range(8))]
    assert answers == [expected] * 8
    requests = counted(monkeypatch)
    assert shown(folder) == expected and requests["read"] == 0


def older(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE records")
        connection.execute("CREATE TABLE records (name, manifest)")
        connection.execute("PRAGMA user_version = 0")
    connection.close()


def changed_row(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE records SET record = replace(record, '\"images\":7', '\"images\":8')")
    connection.close()


def of_other_fields(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        rows = connection.execute("SELECT position, name, version FROM records").fetchall()
        for position, name, version in rows:
            checksum = catalog._checksum(position, name, version, "{}")
            connection.execute("UPDATE records SET record = '{}', checksum = ?", [checksum])
    connection.close()


@pytest.mark.parametrize(
    "harm", [older, changed_row, of_other_fields, lambda path: path.write_bytes(b"not a database" * 999)]
)
def test_a_harmed_catalog_is_built_anew(
    folder: FolderStore, harm: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, "ingest", "k", metrics={"images": 7})
    expected = shown(folder)
    harm(catalog_of(folder))
    requests = counted(monkeypatch)
    assert shown(folder) == expected and requests["read"] == 1
    shown(folder)
    requests.clear()
    assert shown(folder) == expected and requests["read"] == 0


def test_a_locked_catalog_is_not_waited_for_and_stays(folder: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "BUSY_SECONDS", 0.05)
    put(folder, "ingest", "k")
    expected = shown(folder)
    connection = sqlite3.connect(catalog_of(folder), isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    assert shown(folder) == expected
    connection.close()
    requests = counted(monkeypatch)
    assert shown(folder) == expected and requests["read"] == 0


def test_a_cache_that_cannot_be_written_costs_only_time(
    folder: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    put(folder, "ingest", "k")
    assert shown(folder) == read_one_by_one(folder) != []


def test_only_what_is_new_is_read(folder: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        put(folder, "ingest", f"k{number}")
    put(folder, "pretrain", "open").unlink()
    for number in range(3):
        create_run(folder, run := f"p-20261126-00000{number}-ffff", make_plan(run, "x"))
        end_run(folder, run, "SUCCEEDED")
    everything = shown(folder), [*all_runs(folder)]
    requests: Counter[str] = counted(monkeypatch)
    assert (shown(folder), [*all_runs(folder)]) == everything
    assert requests == {"names": 1, "versions": 3}
    put(folder, "pretrain", "new")
    create_run(folder, "p-20261126-000009-ffff", make_plan("p-20261126-000009-ffff", "x"))
    requests.clear()
    assert len(shown(folder)) == 21 and len([*all_runs(folder)]) == 4
    # the manifest; the run's plan, no end, no request to stop it
    assert requests["read"] == 4


# ------------------------------------------------------------------------------------------------- in both stores


def test_a_version_changes_with_each_of_its_objects(store: Store, place: Place) -> None:
    _, objects = place
    for name in (
        "a/x.json",
        "a/y.json",
        "a/inner/1/x.json",
        "b/x.json",
        "b/inner/x.json",
        "c/inner/2/y.json",
    ):
        store.create(f"f/{name}", b"old")

    def versions() -> dict[str, str | None]:
        return store.versions("f", ["x.json", "y.json"], "inner")

    first = versions()
    assert [*first] == ["a", "b", "c"] and first["b"] is None and first["c"] is None
    assert first["a"] and versions() == first and store.versions("none", ["x.json"], "inner") == {}
    for name in ("x.json", "y.json"):
        before = versions()
        objects.write(f"f/a/{name}", b"newer")
        assert versions()["a"] not in {None, before["a"]}
    before = versions()
    objects.write("f/a/inner/1/x.json", b"newer")
    assert versions() == before
    store.remove(["f/a/y.json"])
    assert versions()["a"] is None
