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
    commit,
    create_attempt,
    encode,
    open_store,
    remove_checkpoints,
    remove_progress,
)
from tests.support.checkpoints import put_state
from tests.support.memory_store import MemoryStore
from tests.support.records import make_attempt, make_manifest
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


def test_an_attempt_chooses_its_start_once_and_only_the_newest_removes_others(store: Store, place: Place) -> None:
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


DAMAGE = {
    "manifest": lambda checkpoint: (f"{checkpoint.folder}/manifest.json", b'{"job": "pre'),
    "file": lambda checkpoint: (f"{checkpoint.folder}/rank-0.safetensors", b"stAte"),
    "size": lambda checkpoint: (f"{checkpoint.folder}/rank-0.safetensors", b"sta"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    ("damaged", "start", "said"),
    [
        ({36}, 33, None),
        ({24}, 20, "/36 is not used: the result also needs the checkpoint of step 24, which is missing"),
        ({24, 20}, 10, "/33 is not used: the result also needs the checkpoint of step 24, which is missing"),
        ({36, 33, 24, 20, 10}, None, None),
    ],
)
def test_an_attempt_starts_where_its_result_will_be_whole(
    store: Store, place: Place, capsys: pytest.CaptureFixture[str], damage, damaged, start, said
) -> None:
    """Step 10 is to be kept. The best was at 8, which is removed since it was at 24."""
    bests = {10: 8, 20: 8, 24: 24, 33: 24, 36: 24}
    for step, best in bests.items():
        checkpoint = put_state(store, 1, step, best=best)
        if step in damaged:
            place[1].write(*DAMAGE[damage](checkpoint))
    chosen = choose_start(store, make_attempt("pretrain", key="pa", number=2), (10, 40))
    assert (chosen and chosen.step) == start
    warnings = capsys.readouterr().err
    assert all(f"checkpoints/{step}/" in warnings for step in damaged)
    assert said is None or said in warnings


def test_what_cannot_be_had_without_beginning_anew_is_the_users_decision(store: Store) -> None:
    """A step may also have been added to keep_steps after it had passed."""
    for step in (20, 30):
        put_state(store, 1, step)
    attempt = make_attempt("pretrain", key="pa", number=2)
    with pytest.raises(StoreDamaged, match=r"needs the checkpoint of step 10, which .*remove the step from keep_"):
        choose_start(store, attempt, (10,))
    assert choose_start(store, attempt, ()).step == 30, "nothing was chosen"


def test_an_older_attempt_that_wakes_up_removes_nothing_of_a_later_one(tmp_path: Path, monkeypatch) -> None:
    store = open_store(str(tmp_path / "store"))
    put_state(store, 1, 10)

    def find_none(*_: object) -> None:
        """Answer that there is no later attempt, when there is one and has written a checkpoint."""
        monkeypatch.undo()
        put_state(store, 2, 20)

    monkeypatch.setattr(store, "read", find_none)
    remove_checkpoints(store, make_attempt("pretrain", key="pa", number=1))
    assert [each.step for each in checkpoints(store, "pretrain", "pa")] == [20]


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
    with pytest.raises(AssertionError, match="is not committed"):
        remove_progress(store, "pretrain", "pa")
    assert snapshot(tmp_path / "store") == before
    commit(store, make_manifest("pretrain", key="pa"))
    remove_progress(store, "pretrain", "pa")
    left = {path.relative_to(tmp_path / "store").as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    records = {f"{Layout.attempt('pretrain', 'pa', 2)}/attempt.json", Layout.manifest("pretrain", "pa")}
    assert left == {*kept, *records, "store.json"}


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
        commit(store, make_manifest("pretrain", key="pa"))
        before = store.listed
        remove_progress(store, "pretrain", "pa")
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
