"""`vitflow alias`: a name for a model wherever a command takes one, its history, and the way back."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.store import open_store
from tests.support.in_process import vitflow
from tests.support.records import committed


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two models and a dataset of one recipe."""
    opened = open_store(str(tmp_path))
    for number, (job, key) in enumerate([("pretrain", "a1"), ("finetune", "b2"), ("ingest", "c3")]):
        made = {"stage": job, "run": f"nightly-20260101-00000{number}-0000", "content_digest": key, "nonce": key}
        with committed(opened, job, key * 20, **made) as folder:
            (folder / "file").write_text(key)
    return tmp_path


def alias(store: Path, *arguments: str, check: int = 0) -> str:
    done = vitflow("alias", *arguments, "--store", store, check=check)
    return done.stdout if check == 0 else done.stderr


def history(store: Path) -> list[tuple[int, str, str]]:
    records = json.loads(alias(store, "history", "production", "--json"))
    return [(record["number"], record["key"][:2], record["why"]) for record in records]


def test_an_alias_names_a_model_for_every_command_and_goes_back(store: Path) -> None:
    assert "@production names nightly/pretrain a1a1a1a1a1a1 (move 1)" in alias(store, "set", "production", "a1")
    assert "already names" in alias(store, "set", "@production", "a1")
    assert "before: nightly/pretrain" in alias(store, "set", "production", "b2b2")
    alias(store, "set", "staging", "@production")

    def roots(selector: str) -> Any:
        return json.loads(vitflow("lineage", selector, "--store", store, "--json").stdout)["roots"]

    assert roots("@production") == roots("@staging") == ["b2" * 20]
    assert "@production names nightly/pretrain" in alias(store, "rollback", "@production")
    assert roots("@production") == ["a1" * 20]
    alias(store, "rollback", "production", "--to", "2")
    moves = [(1, "a1", "person"), (2, "b2", "person"), (3, "a1", "rollback"), (4, "b2", "rollback")]
    assert history(store) == moves
    listed = json.loads(alias(store, "list", "--json"))
    assert [(row["alias"], row["recipe/stage"], row["number"]) for row in listed] == [
        ("production", "nightly/finetune", 4),
        ("staging", "nightly/finetune", 1),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rollback", "production"), "no alias is called 'production'; there are: stable"),
        (("rollback", "stable"), "@stable has no earlier move to another model to go back to"),
        (("rollback", "stable", "--to", "7"), "@stable has no move 7 to go back to"),
        (("set", "production", "@stabel"), "no alias is called 'stabel'; did you mean 'stable'?"),
        (("set", "production", "c3"), "no model or detector has a key that begins with 'c3'"),
        (("set", "Best", "a1"), "'Best' is not a valid alias"),
    ],
)
def test_what_cannot_be_named_is_refused(store: Path, arguments: tuple[str, ...], message: str) -> None:
    alias(store, "set", "stable", "a1")
    assert message in alias(store, *arguments, check=2)
    assert "production" not in alias(store, "list")


def test_a_model_that_was_removed_is_not_gone_back_to(store: Path) -> None:
    alias(store, "set", "production", "a1")
    alias(store, "set", "production", "b2")
    (store / f"artifacts/pretrain/{'a1' * 20}/manifest.json").unlink()
    assert "model a1a1a1a1a1a1 of move 1 was removed" in alias(store, "rollback", "production", check=2)
