"""Nothing in a store is overwritten, and nothing half-written is ever visible."""

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipelines import store as st
from pipelines.folder_store import FolderStore
from pipelines.store import FileEntry, Layout, Store, StoreError, open_store
from tests.records import make_attempt, make_manifest


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def test_of_many_writers_exactly_one_wins_and_its_bytes_stay(store: Store) -> None:
    barrier = threading.Barrier(16)

    def race(who: int) -> bool:
        barrier.wait()
        return open_store(store.uri).create("contested/name.json", f"{who};".encode() * 1000)

    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(race, range(16)))
    assert sum(won) == 1
    assert store.read("contested/name.json") == f"{won.index(True)};".encode() * 1000
    assert [path.name for path in (store.root / "contested").iterdir()] == ["name.json"], (
        "no temporary file is left"
    )


def test_a_store_keeps_its_id_and_two_stores_differ(tmp_path: Path) -> None:
    one = open_store(str(tmp_path / "a"))
    assert open_store(str(tmp_path / "a")).id == one.id
    assert open_store(str(tmp_path / "b")).id != one.id


def test_a_folder_that_is_no_store_is_not_made_one_by_looking(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a store"):
        open_store(str(tmp_path), create=False)
    assert not list(tmp_path.iterdir())


def test_a_store_of_another_layout_is_refused(store: Store) -> None:
    (store.root / Layout.STORE).write_text('{"id": "x", "layout": 99}')
    with pytest.raises(StoreError, match="layout 99"):
        open_store(store.uri)


def test_a_store_that_cannot_be_made_is_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="can't write"):
        open_store(str(tmp_path / "file" / "store"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_store_is_one_clear_message(store: Store) -> None:
    store.root.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(StoreError, match="can't write"):
        store.create("x", b"")


def test_no_space_is_one_clear_message_and_leaves_nothing() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("/dev/full is not there")
    with pytest.raises(StoreError, match="can't write"):
        FolderStore(full)


def test_staged_files_appear_only_when_the_block_ends_well(store: Store) -> None:
    folder = Layout.files("ingest", "k", 1)
    with pytest.raises(RuntimeError), store.staging(folder) as staging:
        (staging.path / "half.bin").write_bytes(b"half")
        raise RuntimeError
    assert store.names(folder) == []
    with store.staging(folder) as staging:
        (staging.path / "sub").mkdir()
        (staging.path / "sub" / "whole.bin").write_bytes(b"whole")
        assert store.names(folder) == []
    expected = FileEntry(path="sub/whole.bin", size=5, sha256="0" * 64)
    (entry,) = staging.files
    assert entry == expected.model_copy(update={"sha256": entry.sha256})
    assert store.read(f"{folder}/sub/whole.bin") == b"whole"


def test_two_tasks_may_stage_into_one_folder(store: Store) -> None:
    with store.staging("f") as one, store.staging("f") as two:
        (one.path / "1").write_bytes(b"1")
        (two.path / "2").write_bytes(b"2")
    assert [[entry.path for entry in staging.files] for staging in (one, two)] == [["1"], ["2"]]
    assert store.names("f") == ["1", "2"]


def test_the_first_commit_counts(store: Store) -> None:
    assert st.commit(store, make_manifest(nonce="first")).nonce == "first"
    assert st.commit(store, make_manifest(nonce="second")).nonce == "first"
    found = st.read_manifest(store, "ingest", "k")
    assert found is not None
    assert found.nonce == "first"


def test_the_highest_attempt_is_the_present_one(store: Store) -> None:
    assert st.last_attempt(store, "ingest", "k") is None
    for number in (1, 2, 10, 9):
        st.create_attempt(store, make_attempt(number=number))
    last = st.last_attempt(store, "ingest", "k")
    assert last is not None
    assert last.number == 10
    assert st.create_attempt(store, make_attempt(number=10, nonce="late")).nonce == "n", (
        "the one who was first"
    )


def test_an_attempt_folder_without_its_record_is_none(store: Store) -> None:
    (store.root / Layout.attempt("ingest", "k", 3)).mkdir(parents=True)
    assert st.last_attempt(store, "ingest", "k") is None


def test_replaced_keys_are_followed_to_the_last_that_is_there(store: Store) -> None:
    def current() -> str:
        found = st.read_current(store, "ingest", "a")
        assert found is not None
        manifest, reference = found
        assert reference == st.input_ref(store, manifest)
        return manifest.key

    assert st.read_current(store, "ingest", "a") is None
    st.commit(store, make_manifest(key="a"))
    assert st.replace_artifact(store, "ingest", "a", "b", "r", "why")
    assert st.replace_artifact(store, "ingest", "b", "c", "r", "why")
    assert not st.replace_artifact(store, "ingest", "a", "x", "r", "why"), "said once"
    assert current() == "a", "what was there stands until its successor is"
    st.commit(store, make_manifest(key="c"))
    assert current() == "c"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": "x"}', "\x00"])
def test_a_damaged_store_is_one_clear_message(store: Store, text: str) -> None:
    (store.root / Layout.STORE).write_text(text)
    with pytest.raises(StoreError, match="can't be read"):
        open_store(store.uri)


def test_events_come_back_in_their_order(store: Store) -> None:
    for number in range(20):
        st.add_event(store, "run", "tick", number=number)
    assert [event["number"] for event in st.read_events(store, "run")] == list(range(20))


def test_a_damaged_record_is_one_clear_message(store: Store) -> None:
    store.create(Layout.manifest("ingest", "k"), b"{}")
    with pytest.raises(StoreError, match="is damaged"):
        st.read_manifest(store, "ingest", "k")


def test_a_file_system_without_hard_links_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)  # such a file system can't be made in a test
    with pytest.raises(StoreError, match="hard links"):
        store.create("x", b"")
    assert store.names("") == ["store.json"]
