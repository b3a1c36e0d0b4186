"""How what is in use is kept from `vitflow gc`: the records of a garbage collection, and a run's answer to them.

A record gc/<n>.json lists artifacts that nothing needs. At most one record is open, the last. After its grace period,
a gc closes it, looks again at what is needed, writes down once and for all what is deleted, deletes that, and ends the
record (`pipelines.engine.gc`). Until a record is closed, a run that plans a listed artifact keeps it, by an object
beside the record. After that it is too late, unless the artifact is not among the deleted ones.

A key that was deleted is never used again: its replaced.json, which remains, names the key under which the same stage
is made. So a gc that was suspended while it deleted, and wakes up, does no harm.
"""

from __future__ import annotations

from pipelines.environment import environment
from pipelines.errors import StoreDamaged
from pipelines.identity import successor_key
from pipelines.store.artifacts import replace_artifact, successors
from pipelines.store.objects import numbers, read_record, warn
from pipelines.store.protocol import Store, encode
from pipelines.store.records import Layout, Name, Time, now, who
from vit_model.fields import Frozen

LOOK_SECONDS = 3600.0  # between a process's looks for a new record, whose grace period is longer


class Garbage(Frozen):
    """An artifact that nothing needs, or attempts that did not finish."""

    job: Name
    key: Name
    stage: str
    run: str
    bytes: int
    is_finished: bool
    sign: str | None = None
    """The sha256 of the newest attempt's sign of life, if it is not finished; None if there is none."""


class GcRecord(Frozen):
    """The content of gc/<n>.json."""

    time: Time
    grace_hours: float
    who: str
    nonce: str
    artifacts: tuple[Garbage, ...]


class Deletes(Frozen):
    """The content of gc/<n>/deletes.json: (job, key) of the listed artifacts that are deleted."""

    time: Time
    who: str
    nonce: str
    artifacts: tuple[tuple[Name, Name], ...]


def open_record(store: Store) -> tuple[int, GcRecord] | None:
    """Return the open record and its number; None if there is none. Raises StoreDamaged."""
    number = max(numbers(store, "gc"), default=0)
    if not number or "over.json" in store.names(Layout.gc(number)):
        return None
    record = read_record(store, f"{Layout.gc(number)}.json", GcRecord)
    assert record is not None
    return number, record


def read_deletes(store: Store, number: int) -> Deletes | None:
    """Return what is deleted of a record; None if that is not decided yet. Raises StoreDamaged."""
    return read_record(store, f"{Layout.gc(number)}/deletes.json", Deletes)


def retire(store: Store, job: str, key: str, by: str) -> str:
    """Give up a key that is deleted; return the one under which its stage is made from now on."""
    replace_artifact(store, job, key, successor_key(key, "gc"), by, "gc")
    return [*successors(store, job, key)][-1]


class Keeper:
    """Keeps what one run, or one alias, uses. It looks for a record at most once an hour."""

    def __init__(self, store: Store, user: str) -> None:
        self._store, self._user = store, user
        self._number, self._listed = 0, frozenset[tuple[str, str]]()
        self._kept: set[tuple[str, str]] = set()
        self._looked_at: float | None = None

    def look(self) -> None:
        """Look for an open record; call this before reading the manifest of what is to be kept."""
        moment = environment().monotonic()
        if self._looked_at is not None and moment < self._looked_at + LOOK_SECONDS:
            return
        try:
            found = open_record(self._store)
        except StoreDamaged as error:  # then nothing of it is deleted
            warn(f"{error}; ignoring it")
            found = None
        self._number, record = found or (0, None)
        self._listed = frozenset((each.job, each.key) for each in record.artifacts) if record else frozenset()
        self._looked_at = moment

    def keep(self, job: str, key: str) -> bool:
        """Keep an artifact; return False if it is too late. Without a record that lists it, this makes no request."""
        artifact = (job, key)
        if artifact not in self._listed or artifact in self._kept:
            return True
        folder = Layout.gc(self._number)
        self._store.create(f"{folder}/keeps/{job}-{key}.json", encode({"by": self._user, "who": who(), "time": now()}))
        if "closed.json" in self._store.names(folder):
            deletes = read_deletes(self._store, self._number)
            if deletes is None or artifact in deletes.artifacts:
                return False
        self._kept.add(artifact)
        return True
