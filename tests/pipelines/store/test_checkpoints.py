"""Checkpoints of a training that has not ended: which are valid, which an attempt starts from, who removes them."""

from pathlib import Path

import pytest

from pipelines.errors import Superseded
from pipelines.store import (
    Layout,
    StoreDamaged,
    checkpoints,
    choose_start,
    create_attempt,
    encode,
    open_store,
    remove_checkpoints,
)
from tests.support.checkpoints import put_state
from tests.support.records import make_attempt


def test_what_training_can_resume_from_is_read_as_far_as_it_is_readable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(str(tmp_path / "store"))
    first, second = put_state(store, 1, 10), put_state(store, 2, 9)
    for step, record in {11: b"[]", 12: b'{"step": "x"}', 13: encode(first)}.items():
        store.create(f"{Layout.checkpoint('pretrain', 'pa', 2, step)}/manifest.json", record)
    store.create(f"{Layout.checkpoint('pretrain', 'pa', 3, 14)}/rank-0.safetensors", b"not committed")
    assert checkpoints(store, "pretrain", "pa") == [first, second]
    said = capsys.readouterr().err
    assert said.count("is damaged") == 3 and "2/checkpoints/11/manifest.json" in said


def test_an_attempt_chooses_its_start_once_and_only_the_newest_removes_others(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
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
    assert not (tmp_path / "store" / early.folder).exists()
    assert store.names(Layout.checkpoint("pretrain", "pa", 2, 14)) == ["rank-0.safetensors"]
    remove_checkpoints(store, second)
    assert checkpoints(store, "pretrain", "pa") == []
    with pytest.raises(StoreDamaged, match="names step 10 of attempt 1, which is not there"):
        choose_start(store, second)


def test_the_beginning_may_be_the_start(tmp_path: Path) -> None:
    store, attempt = open_store(str(tmp_path / "store")), make_attempt("pretrain", key="pa", number=2)
    assert choose_start(store, attempt) is None
    put_state(store, 2, 5)
    assert choose_start(store, attempt) is None
