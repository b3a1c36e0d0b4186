"""An alias's history is one line: numbered, create-only, and moved only by who has seen its last record."""

import pytest

from pipelines.store import (
    InputRef,
    StoreError,
    alias_history,
    alias_names,
    check_alias,
    commit,
    input_ref,
    move_alias,
    not_undone,
    read_alias,
)
from tests.support.memory_store import MemoryStore
from tests.support.records import make_manifest
from vit_model.errors import UserError


def model(key: str) -> InputRef:
    return InputRef(job="pretrain", key=key, content_digest=f"d{key}", manifest_sha256="0" * 64)


def store_of(*keys: str) -> MemoryStore:
    store = MemoryStore()
    for key in keys:
        commit(store, make_manifest("pretrain", key=key))
    return store


def test_the_highest_record_is_current_and_a_rollback_is_a_new_one() -> None:
    store = store_of("a", "b")
    assert read_alias(store, "production") is None
    first = move_alias(store, "production", model("a"), 0, "person")
    second = move_alias(store, "production", model("b"), first.number, "rule", report="c", run="r")
    third = move_alias(store, "production", first.target, second.number, "rollback")
    assert read_alias(store, "production") == third
    assert [record.number for record in alias_history(store, "production")] == [1, 2, 3]
    assert third.target == model("a")
    move_alias(store, "production", None, 3, "person")
    assert alias_names(store) == ["production"]


def test_who_has_not_seen_the_last_record_is_refused() -> None:
    store = store_of("a", "b")
    move_alias(store, "production", model("a"), 0, "person")
    with pytest.raises(StoreError, match="@production was moved by another process"):
        move_alias(store, "production", model("b"), 0, "rule")
    assert [record.target for record in alias_history(store, "production")] == [model("a")]


@pytest.mark.parametrize(
    ("moves", "left"),
    [("ab", "ab"), ("aba", "aba"), ("abaB", "ab"), ("abaBA", "a"), ("abcA", "a"), ("abAcA", "a"), ("abAB", "aB")],
)
def test_what_a_rollback_has_undone_is_not_gone_back_to(moves: str, left: str) -> None:
    """A capital is a rollback to that model; of the last, `--to` named a move that had been undone."""
    store = store_of("a", "b", "c")
    for number, move in enumerate(moves):
        move_alias(store, "production", model(move.lower()), number, "rollback" if move.isupper() else "person")
    remaining = not_undone(alias_history(store, "production"))
    assert [record.target for record in remaining] == [model(each.lower()) for each in left]


def test_a_model_that_was_deleted_after_the_caller_had_found_it_is_refused() -> None:
    with pytest.raises(StoreError, match="@production: pretrain c was deleted, or is being deleted"):
        move_alias(store_of(), "production", model("c"), 0, "person")
    with pytest.raises(StoreError, match="pretrain c is not in the store any more"):
        input_ref(store_of(), make_manifest("pretrain", key="c"))


@pytest.mark.parametrize("name", ["", "Production", "../x", "a" * 42, "a/b", "1st"])
def test_a_name_that_is_no_alias(name: str) -> None:
    with pytest.raises(UserError, match="is not a valid alias; expected a lowercase letter"):
        check_alias(name)
