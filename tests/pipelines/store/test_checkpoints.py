"""Checkpoints of a training that has not ended: which are valid, which an attempt starts from, who removes them."""

from pathlib import Path

import pytest

from pipelines.errors import Superseded
from pipelines.store import (
    Layout,
    Store,
    StoreDamaged,
    checkpoints,
    choose_start,
    create_attempt,
    encode,
    open_store,
    remove_checkpoints,
    remove_progress,
)
from tests.support.checkpoints import put_state
from tests.support.memory_store import MemoryStore
from tests.support.records import make_attempt
from tests.support.stores import Place, snapshot


def test_what_training_can_resume_from_is_read_as_far_as_it_is_readable(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = put_state(store, 1, 10), put_state(store, 2, 9)
    for step, record in {11: b"[]", 12: b'{"step": "x"}', 13: encode(first)}.items():
        store.create(f"{Layout.checkpoint('pretrain', 'pa', 2, step)}/manifest.json", record)
    store.create(f"{Layout.checkpoint('pretrain', 'pa', 3, 14)}/rank-0.safetensors", b"not committed")
    assert checkpoints(store, "pretrain", "pa") == [first, second]
    said = capsys.readouterr().err
    assert said.count("is damaged") == 3 and "2/checkpoints/11/manifest.json" in said


def test_an_attempt_chooses_its_start_once_and_only_the_newest_removes_others(
    store: Store, place: Place
) -> None:
    early, late = put_state(store, 1, 5), put_state(store, 1, 10)
    first, second = (make_attempt("pretrain", key="pa", number=number) for number in (1, 2))
    create_attempt(store, second)
    assert choose_start(store, second) == late
    with pytest.raises(Superseded):
        put_state(store, 1, 15)
    with pytest.raises(Superseded):
        remove_checkpoints(store, first, [late], 10)
    assert choose_start(store, second) == late
    own = put_state(store, 2, 12)
    store.create(f"{Layout.checkpoint('pretrain', 'pa', 2, 14)}/rank-0.safetensors", b"being written")
    remove_checkpoints(store, second, [late, own], 12)
    assert checkpoints(store, "pretrain", "pa") == [own, late]
    assert place[1].objects(early.folder) == {}
    assert store.names(Layout.checkpoint("pretrain", "pa", 2, 14)) == ["rank-0.safetensors"]
    remove_checkpoints(store, second)
    assert place[1].objects("artifacts/pretrain/pa/attempts/").keys() == {
        f"{Layout.attempt('pretrain', 'pa', 2)}/{name}.json" for name in ("attempt", "start")
    }
    with pytest.raises(StoreDamaged, match="names step 10 of attempt 1, which is not there"):
        choose_start(store, second)


def test_a_committed_result_needs_neither_checkpoints_nor_ledgers(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    kept = {put(store, number, "files/model.safetensors") for number in (1, 2)}
    for number in (1, 2):
        put_state(store, number, 5)
        put_state(store, number, 10, fit="trial-0-1")
        put(store, number, "checkpoints/refit-0-0/3/not-committed.safetensors")
        put(store, number, "ledger/trial-0-0.json")
    create_attempt(store, make_attempt("pretrain", key="pa", number=2))
    before = snapshot(tmp_path / "store")
    with pytest.raises(Superseded):
        remove_progress(store, make_attempt("pretrain", key="pa", number=1))
    assert snapshot(tmp_path / "store") == before
    remove_progress(store, make_attempt("pretrain", key="pa", number=2))
    left = {path.relative_to(tmp_path / "store").as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {*kept, "store.json", f"{Layout.attempt('pretrain', 'pa', 2)}/attempt.json"}


class Counting(MemoryStore):
    """A store that counts how often it lists names."""

    listed = 0

    def names(self, folder: str) -> list[str]:
        self.listed += 1
        return super().names(folder)


def test_removing_them_takes_time_in_proportion_to_their_number() -> None:
    listed = []
    for attempts in (10, 20):
        store = Counting()
        for number in range(1, attempts + 1):
            put_state(store, number, 5)
            put_state(store, number, 10, fit="trial-0-1")
        before = store.listed
        remove_progress(store, make_attempt("pretrain", key="pa", number=attempts))
        listed.append(store.listed - before)
        assert not [name for name in store.objects if "/checkpoints/" in name]
    assert listed[1] <= 2 * listed[0]


def put(store: Store, number: int, name: str) -> str:
    """Write an object of an attempt and return its name."""
    name = f"{Layout.attempt('pretrain', 'pa', number)}/{name}"
    store.create(name, b"bytes")
    return name


def test_fits_have_checkpoints_of_their_own(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    pretraining, other = put_state(store, 1, 30), put_state(store, 2, 20, fit="trial-0-1")
    first, second = (put_state(store, number, 10, fit="trial-0-0") for number in (1, 2))
    assert checkpoints(store, "pretrain", "pa", "trial-0-0") == [second, first]
    assert checkpoints(store, "pretrain", "pa", "trial-0-0", [1]) == [first]
    remove_checkpoints(store, make_attempt("pretrain", key="pa", number=2), [second], 10, "trial-0-0")
    assert checkpoints(store, "pretrain", "pa", "trial-0-0") == [second]
    assert checkpoints(store, "pretrain", "pa", "trial-0-1") == [other]
    assert checkpoints(store, "pretrain", "pa") == [pretraining]


def test_the_beginning_may_be_the_start(store: Store) -> None:
    attempt = make_attempt("pretrain", key="pa", number=2)
    assert choose_start(store, attempt) is None
    put_state(store, 2, 5)
    assert choose_start(store, attempt) is None
