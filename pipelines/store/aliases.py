"""Aliases: names such as `production` for a model, each with its history.

A move of an alias is a record aliases/<name>/<n>.json, created once; the highest number is current, and a rollback is a
new record that names an earlier target. Who moves an alias says which record he has seen (`expected`), so of two who
decide on the same one the second is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pipelines.environment import environment
from pipelines.errors import AliasMoved, StoreError
from pipelines.spec import check_given_name
from pipelines.store.artifacts import is_committed
from pipelines.store.keeping import Keeper
from pipelines.store.objects import numbers, read_record
from pipelines.store.protocol import Store, encode
from pipelines.store.records import InputRef, Layout, Manifest, Name, Time, now, who
from vit_model.fields import Frozen

PROMOTED = "promoted"
"""The verdict of a stage `promote` after which its run moves the alias."""


class Alias(Frozen):
    """One move of an alias. `target` None: the alias names nothing from then on."""

    target: InputRef | None
    expected: int
    """The number of the record before this one, 0 for the first; this record's number is one more."""
    why: Literal["rule", "person", "rollback"]
    report: Name | None = None
    """The key of the comparison that decided, for `rule`."""
    run: str | None = None
    who: str
    time: Time
    nonce: str

    @property
    def number(self) -> int:
        return self.expected + 1


def check_alias(name: str) -> str:
    """Return an alias's name if it is valid. Raises RecipeError."""
    return check_given_name(name, "alias")


def alias_names(store: Store) -> list[str]:
    """Return the names of all aliases that were ever set."""
    return store.names("aliases")


def read_alias(store: Store, name: str) -> Alias | None:
    """Return the current record of an alias; None if it was never set. Raises StoreDamaged."""
    last = max(numbers(store, Layout.alias(name)), default=0)
    return _read(store, name, last) if last else None


def alias_history(store: Store, name: str, since: int = 0) -> list[Alias]:
    """Return the records of an alias with a number above `since`, oldest first. Raises StoreDamaged."""
    return [*newest_moves(store, name, since)][::-1]


def newest_moves(store: Store, name: str, since: int = 0) -> Iterator[Alias]:
    """Yield the same, newest first; each is read when it is asked for. Raises StoreDamaged."""
    for number in sorted(numbers(store, Layout.alias(name)), reverse=True):
        if number > since and (record := _read(store, name, number)) is not None:
            yield record


def not_undone(history: list[Alias]) -> list[Alias]:
    """Return the moves of a history, oldest first, that no rollback has undone; the last one names the current target.

    So a second rollback in a row goes back further, and does not return to what the first one left.
    """
    left: list[Alias] = []
    for record in history:
        if record.why == "rollback":
            named = [number for number, earlier in enumerate(left) if earlier.target == record.target]
            left = left[: named[-1] + 1] if named else [*left, record]
        else:
            left.append(record)
    return left


def move_alias(
    store: Store,
    name: str,
    target: InputRef | None,
    expected: int,
    why: Literal["rule", "person", "rollback"],
    report: str | None = None,
    run: str | None = None,
) -> Alias:
    """Record that an alias names `target` from now on.

    Args:
        expected: the number of the record that the decision was made on; 0 if there was none.

    Raises:
        AliasMoved: somebody else has moved it since; decide again.
        StoreError: `gc` has deleted the target, or is deleting it.
    """
    keeper = Keeper(store, f"@{name}")
    keeper.look()
    if target is not None:
        # a gc may have ended since the caller read the manifest
        is_kept = keeper.keep(target.job, target.key) and is_committed(store, target.job, target.key)
        if not is_kept:
            model = f"{target.job} {target.key[:12]}"
            raise StoreError(f"@{name}: {model} was deleted, or is being deleted by `vitflow gc`; name another one")
    record = Alias(
        target=target,
        expected=expected,
        why=why,
        report=report,
        run=run,
        who=who(),
        time=now(),
        nonce=environment().token_hex(8),
    )
    if not store.create(f"{Layout.alias(check_alias(name))}/{record.number}.json", encode(record)):
        raise AliasMoved(f"@{name} was moved by another process at the same time; check it and retry")
    return record


def promotion_of(manifest: Manifest) -> dict[str, Any] | None:
    """Return {alias, verdict, reason} of a stage `promote`; None for other stages."""
    if manifest.job != "promote":
        return None
    named = {"alias": str(manifest.config["against"]).removeprefix("@")}
    return named | {name: manifest.metrics[name] for name in ("verdict", "reason")}


def promotion_sentence(promotion: Mapping[str, Any]) -> str:
    """Say what a promotion decided."""
    verdict = promotion["verdict"]
    refused = "" if verdict in (PROMOTED, "same") else "refused, "
    return f"@{promotion['alias']}: {refused}{verdict}: {promotion['reason']}"


def _read(store: Store, name: str, number: int) -> Alias | None:
    return read_record(store, f"{Layout.alias(name)}/{number}.json", Alias)
