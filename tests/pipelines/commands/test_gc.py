"""What `vitflow gc` says and does on a store and on the caches of a machine."""

import fcntl
import json
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pipelines.store.folder import FolderStore
from tests.conftest import Vitflow
from tests.support.records import committed

RUN = "digits-20260101-000000-0000"


def test_it_shows_what_nothing_needs_by_recipe_and_stage_and_deletes_it_when_told(
    vitflow_here: Vitflow, tmp_path: Path
) -> None:
    store = FolderStore(tmp_path / "store")
    old = (datetime.now(UTC) - timedelta(days=90)).isoformat()
    for key, finished in (("old", old), ("older", old), ("new", datetime.now(UTC).isoformat())):
        with committed(store, "ingest", key, finished=finished, run=RUN, stage="images") as folder:
            (folder / "rows").write_bytes(bytes(10**6))
    shown = vitflow_here("gc", "--store", store.root).stdout
    assert "digits/images  2          2.0 MB" in shown
    assert "it is new  1          1.0 MB" in shown
    assert f"`vitflow gc --delete --store {store.root}` lists them; the same command deletes them 24 hours" in shown
    chosen = vitflow_here("gc", "--store", store.root, "--keep-days", "60", "--grace", "2").stdout
    assert f"--store {store.root} --keep-days 60 --grace 2` lists them; the same command deletes them 2 h" in chosen
    asked = ("gc", "--store", store.root, "--json")
    stage = {"recipe": "digits", "stage": "images", "finished": True, "artifacts": 2, "bytes": 2 * 10**6}
    listed = json.loads(vitflow_here(*asked, "--delete").stdout)
    assert listed["kept"] == [{"why": "it is new", "artifacts": 1, "bytes": 10**6}]
    assert (listed["unneeded"], listed["deleted"], listed["record"]) == ([stage], [], 1)
    assert "gc/1.json lists what is deleted by `vitflow gc --delete" in vitflow_here("gc", "--store", store.root).stdout
    assert json.loads(vitflow_here(*asked, "--keep-days", "365").stdout)["unneeded"] == []


def test_cached_files_that_nothing_has_read_lately_are_deleted_unless_they_are_in_use(
    vitflow_here: Vitflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = tmp_path / "vitflow"
    files = [cache / name for name in ("objects/a/b/old", "objects/a/new", "unpacked/old", "unpacked/busy")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"1234")
        if file.name != "new":
            os.utime(file, (time.time() - 40 * 86_400,) * 2)
    with (cache / "unpacked/busy.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "unpacked archives: 2 files" in vitflow_here("gc", "--caches").stdout
        assert all(file.exists() for file in files)
        deleted = json.loads(vitflow_here("gc", "--caches", "--delete", "--json").stdout)["deleted"]
    assert deleted == [{"cache": name, "files": 1, "bytes": 4} for name in ("objects", "unpacked")]
    assert [file.name for file in files if file.exists()] == ["new", "busy"]
    assert not (cache / "objects/a/b").exists()
