"""Nothing in a store is overwritten, and nothing half-written is ever visible: in a folder as on S3."""

import errno
import hashlib
import os
import secrets
import shutil
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipelines import store as st
from pipelines.store import (
    FileEntry,
    Layout,
    Store,
    StoreAbsent,
    StoreDamaged,
    StoreError,
    StoreUnreachable,
    open_store,
)
from pipelines.store.folder import FolderStore
from tests.support.records import make_attempt, make_manifest
from tests.support.stores import Place


@pytest.fixture
def folder_store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "folder")


def test_of_many_writers_exactly_one_wins_and_its_bytes_stay(store: Store, place: Place) -> None:
    barrier = threading.Barrier(16)

    def race(who: int) -> bool:
        barrier.wait()
        return open_store(store.uri).create("contested/name.json", f"{who};".encode() * 1000)

    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(race, range(16)))
    assert sum(won) == 1
    assert store.read("contested/name.json") == f"{won.index(True)};".encode() * 1000
    assert list(place[1].objects("contested/")) == ["contested/name.json"], "no temporary file is left"


def test_who_writes_the_same_bytes_again_was_first(store: Store) -> None:
    """The answer to the first try may have been lost."""
    assert store.create("a", b"mine")
    assert store.create("a", b"mine")
    assert not store.create("a", b"another's")
    assert store.read("a") == b"mine"


def test_who_reads_what_is_replaced_sees_the_old_bytes_or_the_new(store: Store, place: Place) -> None:
    written = [f"{number};".encode() * 1000 for number in range(20)]
    store.replace("a/alive.json", written[0])
    over = threading.Event()

    def watch() -> set[bytes | None]:
        other, seen = open_store(store.uri), set()
        while not over.is_set():
            seen.add(other.read("a/alive.json"))
        return seen

    with ThreadPoolExecutor(1) as pool:
        watcher = pool.submit(watch)
        for data in written:
            store.replace("a/alive.json", data)
        over.set()
        assert watcher.result() <= set(written)
    assert store.read("a/alive.json") == written[-1]
    assert list(place[1].objects("a/")) == ["a/alive.json"], "no temporary file is left"


def test_what_is_removed_is_gone_with_its_folders_and_nothing_else(store: Store, place: Place) -> None:
    for name in ("a/b/c/x", "a/b/y", "a/z"):
        store.create(name, b"1")
    store.remove(["a/b/y", "a/b/absent", "no/such/folder", "a/z/below/an/object", "a/b/c/x"])
    assert place[1].objects("a/") == {"a/z": 1}
    assert store.names("a") == ["z"]
    store.remove(["a/z"])
    assert store.names("") == ["store.json"]


def test_names_begin_with_a_prefix_and_follow_another(store: Store) -> None:
    for run in (
        "mine-20251231",
        "mine-20261125",
        "mine-20261126",
        "mine-2-20261126",
        "mine-x-20261126",
        "other",
    ):
        store.create(f"runs/{run}/plan.json", b"{}")
    store.create("runs/mine-20261127", b"{}")
    assert store.names("runs", "mine-20") == [f"mine-20{day}" for day in ("251231", "261125", "261126", "261127")]
    assert store.names("runs", "mine-2", "mine-20261125") == ["mine-20261126", "mine-20261127"]
    assert store.names("runs", after="mine-20261126") == ["mine-20261127", "mine-x-20261126", "other"]
    assert store.names("runs", "none") == store.names("runs", after="z") == []


def test_what_killed_writers_left_goes_with_the_last_object_of_a_folder(folder_store: FolderStore) -> None:
    folder_store.create("a/b/c", b"1")
    folder_store.create("a/b/d", b"1")
    (folder_store.root / "a/b/.staging-0").mkdir()
    for temporary in (".staging-0/half", ".c.0.tmp"):
        (folder_store.root / "a/b" / temporary).write_bytes(b"1")
    folder_store.remove(["a/b/c"])
    assert (folder_store.root / "a/b/.staging-0/half").exists(), "somebody may be writing"
    folder_store.remove(["a/b/d"])
    assert not (folder_store.root / "a").exists()


def test_what_cannot_be_removed_keeps_what_follows(folder_store: FolderStore) -> None:
    for name in ("1", "2/below", "3"):
        folder_store.create(name, b"")
    with pytest.raises(StoreError, match="cannot remove 2: "):
        folder_store.remove(["1", "2", "3"])
    assert folder_store.names("") == ["2", "3", "store.json"]


def test_what_is_not_there_is_none(store: Store) -> None:
    assert store.read("a") is None
    assert store.read("store.json/b") is None
    assert store.names("a") == []


def test_a_range_is_these_bytes_or_an_error(store: Store) -> None:
    data = os.urandom(1000)
    store.create("a/x", data)
    for start, length in ((0, 1000), (17, 100), (999, 1)):
        assert store.read_range("a/x", start, length) == data[start : start + length]
    for name, start in (("a/x", 990), ("a/x", 2000), ("a/y", 0)):
        with pytest.raises(StoreError, match=f"{name}.*damaged|cannot read {name}"):
            store.read_range(name, start, 100)


def test_names_are_the_immediate_children(store: Store) -> None:
    for name in ("a/x", "a/b/y", "a/b/z", "ab/x", "a.json"):
        store.create(name, b"")
    assert store.names("a") == ["b", "x"]
    assert store.names("a/b") == ["y", "z"]
    assert store.names("") == ["a", "a.json", "ab", "store.json"]


def test_a_store_keeps_its_id_and_two_stores_differ(place: Place) -> None:
    one = open_store(f"{place[0]}/a")
    assert open_store(f"{place[0]}/a/").id == one.id
    assert open_store(f"{place[0]}/b").id != one.id


def test_opened_by_many_at_once_it_is_one_store(place: Place) -> None:
    barrier = threading.Barrier(8)

    def identity(_: int) -> str:
        barrier.wait()
        return open_store(place[0]).id

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(identity, range(8)))) == 1


def test_what_is_no_store_is_not_made_one_by_looking(place: Place) -> None:
    with pytest.raises(StoreError, match="is not a store"):
        open_store(place[0], create=False)
    assert place[1].objects() == {}


def test_a_store_of_another_layout_is_refused(store: Store, place: Place) -> None:
    place[1].write(Layout.STORE, b'{"id": "x", "layout": 99}')
    with pytest.raises(StoreError, match="layout 99"):
        open_store(store.uri)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/proc/x", "No such file or directory"),
        ("/proc/x/y", "No such file or directory"),
        ("file", "file is not a folder"),
        ("file/store", "file is not a folder"),
        ("loop/store", "[Ll]oop|[Ll]evels"),
        ("x" * 300, "File name too long"),
        ("~nobody-of-this-name/store", "home directory"),
        ("\udcff", "UTF-8"),
    ],
)
def test_a_folder_that_cannot_be_made_is_one_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("loop").symlink_to("loop")
    with pytest.raises(StoreError, match=said) as error:
        open_store(path)
    assert type(error.value) is StoreError, "damage and silence are not the request's fault"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_one_clear_message(folder_store: FolderStore) -> None:
    folder_store.root.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(StoreError, match="cannot write"):
        folder_store.create("x", b"")


def test_no_space_is_one_clear_message_and_leaves_nothing() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("/dev/full is not there")
    with pytest.raises(StoreError, match="cannot write"):
        FolderStore(full)


@pytest.mark.parametrize("named", ["/elsewhere/file", None])
def test_a_disk_that_gets_full_while_files_are_staged_is_named(store: Store, named: str | None) -> None:
    with pytest.raises(OSError, match="full") as error, store.staging("f") as staging:
        raise OSError(errno.ENOSPC, "full", named)
    assert error.value.filename in ([named] if named else [str(staging.path), str(staging.path.parent)])


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


def test_files_come_back_as_they_were(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.files.s3_client.PART_BYTES", 5 * 2**20)  # the least that S3 takes
    given = {
        "in parts": secrets.token_bytes(5 * 2**20 + 1),
        "empty": b"",
        "one": b"1",
        "deep/er/é ü/+%2F&=?#;~ .bin": secrets.token_bytes(100_000),
        "deep/er/x": bytes(range(256)),
    }
    with store.staging("f") as staging:
        for name, data in given.items():
            (staging.path / name).parent.mkdir(parents=True, exist_ok=True)
            (staging.path / name).write_bytes(data)
    for entry in staging.files:
        assert entry.sha256 == hashlib.sha256(given[entry.path]).hexdigest()
    local = store.local("f", staging.files)
    assert {entry.path: (local / entry.path).read_bytes() for entry in staging.files} == given
    assert store.names("f") == ["deep", "empty", "in parts", "one"]
    assert {name: store.read(f"f/{name}") for name in given} == given


def test_bytes_that_have_changed_are_named_and_not_handed_out(store: Store, place: Place) -> None:
    with store.staging("f") as staging:
        (staging.path / "x").write_bytes(b"12345")
    (entry,) = staging.files
    assert store.digest("f/x") == (5, entry.sha256)
    assert store.digest("f/y") is None
    place[1].write("f/x", b"12346")
    assert store.digest("f/x") == (5, hashlib.sha256(b"12346").hexdigest())
    with pytest.raises(StoreDamaged, match="f/x is damaged: it has sha256"):
        store.local("f", staging.files)
    place[1].write("f/x", b"12345")
    assert (store.local("f", staging.files) / "x").read_bytes() == b"12345"


def test_what_is_larger_than_a_record_is_named_and_hides_no_other(store: Store) -> None:
    for name, data in (("a", b"12"), ("b", b"123"), ("c", b"1")):
        store.create(name, data)
    one, two, three, absent = store.read_all(["a", "b", "c", "d"], 2)
    assert (one, three, absent) == (b"12", b"1", None)
    assert isinstance(two, StoreDamaged)
    with pytest.raises(StoreDamaged, match="b is damaged: it has 3 bytes, a record has at most 2"):
        store.read("b", 2)


def test_a_store_that_was_deleted_is_told_and_not_made_anew(folder_store: FolderStore) -> None:
    with pytest.raises(StoreAbsent, match="no longer a store"), folder_store.staging("f") as staging:
        (staging.path / "x").write_bytes(b"1")
        shutil.rmtree(folder_store.root)
    for ask in (
        lambda: folder_store.staging("f").__enter__(),
        lambda: folder_store.create("runs/r/events/1.json", b"{}"),
        lambda: folder_store.replace("a/alive.json", b"{}"),
        lambda: folder_store.remove(["a/b"]),
        lambda: folder_store.read("runs/r/stop.json"),
    ):
        with pytest.raises(StoreAbsent, match="no longer a store"):
            ask()
    assert not folder_store.root.exists()


def test_two_tasks_may_stage_into_one_folder(store: Store) -> None:
    with store.staging("f") as one, store.staging("f") as two:
        (one.path / "1").write_bytes(b"1")
        (two.path / "2").write_bytes(b"2")
    assert [[entry.path for entry in staging.files] for staging in (one, two)] == [["1"], ["2"]]
    assert store.names("f") == ["1", "2"]


def test_a_folder_that_another_task_has_just_emptied_is_made_again(
    folder_store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fits write and remove checkpoints below one folder."""
    mkdir, emptied = Path.mkdir, []

    def mkdir_late(path: Path, *arguments: Any, **options: Any) -> None:
        if path.name == "mine" and len(emptied) < 3:
            path.parent.rmdir()
            emptied.append(path)
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir_late)
    with folder_store.staging("shared/mine") as staging:
        (staging.path / "file").write_bytes(b"bytes")
    assert len(emptied) == 3
    assert folder_store.read("shared/mine/file") == b"bytes"


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
    assert st.create_attempt(store, make_attempt(number=10, nonce="late")).nonce == "n", "the one who was first"


def test_an_attempt_is_told_of_its_successor(store: Store, place: Place) -> None:
    first, second = make_attempt(number=1), make_attempt(number=2)
    st.create_attempt(store, first)
    st.check_newest(store, first)
    st.create_attempt(store, second)
    st.check_newest(store, second)
    with pytest.raises(st.Superseded, match="attempt 2 of ingest/k has taken over from attempt 1"):
        st.check_newest(store, first)
    place[1].write(f"{Layout.attempt('ingest', 'k', 3)}/attempt.json", b"damaged")
    with pytest.raises(st.Superseded, match="attempt 3"):
        st.check_newest(store, second)


def test_an_attempt_folder_without_its_record_is_none(store: Store, place: Place) -> None:
    place[1].write(f"{Layout.attempt('ingest', 'k', 3)}/files/x", b"left by a driver that was killed")
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
def test_a_damaged_store_is_one_clear_message(store: Store, place: Place, text: str) -> None:
    place[1].write(Layout.STORE, text.encode())
    with pytest.raises(StoreError, match="cannot be read"):
        open_store(store.uri)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_have_the_mode_that_the_umask_gives(tmp_path: Path, umask: int, mode: int) -> None:
    """Safetensors makes its files private to their owner."""
    before = os.umask(umask)
    try:
        store = open_store(str(tmp_path / "store"))
        with store.staging("artifacts/x") as staging:
            save_file({"x": np.zeros(1)}, staging.path / "model.safetensors")
            (staging.path / "curve.json").write_text("[]")
        store.create("artifacts/x/manifest.json", b"{}")
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {mode}, files


def test_events_come_back_in_their_order(store: Store) -> None:
    for number in range(20):
        st.add_event(store, "run", "tick", number=number)
    assert [event["number"] for event in st.read_events(store, "run")] == list(range(20))


def test_a_file_system_without_hard_links_is_refused(
    folder_store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)  # such a file system can't be made in a test
    with pytest.raises(StoreError, match="hard links"):
        folder_store.create("x", b"")
    assert folder_store.names("") == ["store.json"]


def test_a_file_server_that_does_not_answer_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS loses a handle (ESTALE); a disk that can't be read (EIO) does not get better by waiting."""
    store = FolderStore(tmp_path)

    def refuse(number: int) -> type[StoreError]:
        def fail(path: Path) -> bytes:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(Path, "read_bytes", fail)
        with pytest.raises(StoreError) as raised:
            store.read(Layout.STORE)
        return raised.type

    assert refuse(errno.ESTALE) is StoreUnreachable
    assert refuse(errno.EIO) is StoreDamaged
