"""What was decided about the ticks of a schedule, the times at which it is due, and how its runs ended.

A decision is a record ticks/<n>.json, numbered without gaps and created once. Whoever decides takes the number after
the newest decision that he has read. So of two who decide on the same one, the second is refused and reads again: a
tick is decided once, and no run starts beside one that has not been seen. How the run of a tick ended is recorded once,
too, in ends/<n>.json, by whoever first sees it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Literal

from pipelines.engine.status import Status
from pipelines.environment import environment
from pipelines.store import (
    LARGEST_RECORD,
    Layout,
    Store,
    StoreDamaged,
    Time,
    encode,
    now,
    read_record,
    who,
)
from pipelines.store.objects import parse_record
from vit_model.fields import Frozen

Decision = Literal["run", "skip", "missed", "nothing_new"]

_NUMBERED = re.compile(r"([0-9]{8})\.json")
_FEW = 512  # decisions, whose names one request lists
_READ_AT_ONCE = 50
_SEARCHED = 1_000  # decisions, searched for a tick after a clock was set back


class Tick(Frozen):
    """The decision on a tick: a run, or none. `missed` may stand for several ticks, of which `tick` is the last."""

    tick: Time
    decision: Decision
    run: str | None
    """The run that it starts; otherwise the last run, None if there was none."""
    previous: int
    """The number of the decision before this one, 0 for the first; this one's number is one more."""
    why: str = ""
    latest: Time | None = None
    """The latest tick so far, this one or, after a clock was set back, an earlier decision's; None: this one."""
    last: int = 0
    """The number of the last decision, up to this one, that was not to wait: `run` or `nothing_new`."""
    failures: int = 0
    """Runs that failed in a row before this tick, as far as they had ended."""
    skips: int = 0
    """Ticks that were skipped in a row, up to this one."""
    nonce: str
    who: str
    time: Time

    @property
    def number(self) -> int:
        return self.previous + 1

    @property
    def due(self) -> datetime:
        """When it was due."""
        return datetime.fromisoformat(self.tick)

    @property
    def until(self) -> datetime:
        """The latest tick that is decided."""
        return datetime.fromisoformat(self.latest or self.tick)


class Promotion(Frozen):
    """What the run of a tick did to an alias."""

    alias: str
    outcome: Literal["promoted", "refused"]
    why: str = ""


class End(Frozen):
    """How the run of a tick ended: its status, and the first stage that failed, with its error."""

    status: str
    stage: str | None = None
    error: str = ""
    alias: Promotion | None = None
    time: Time
    who: str

    @property
    def failed(self) -> bool:
        """Whether it failed, or stopped because its driver had died; a person's stop is no failure."""
        return self.status == Status.FAILED or (self.status == Status.STOPPED and bool(self.error))

    @property
    def why(self) -> str:
        """What failed, and what became of an alias; empty if there is nothing to say."""
        parts = [self.stage and f"stage {self.stage}", self.error]
        if self.alias is not None:
            parts += [f"@{self.alias.alias} {self.alias.outcome}", self.alias.why]
        return ", ".join(filter(None, parts))


@dataclass
class Position:
    """What a process knows of a schedule's ticks. One that keeps it needs one request to see that nothing is new."""

    is_known: bool = False
    newest: Tick | None = None
    last: Tick | None = None
    """The last tick that was not to wait, whose run may still be under way."""
    end: End | None = None
    """The end of its run."""
    decided: datetime | None = None
    """A tick older than the newest that was found to be decided."""
    look_at: float = 0.0
    """When to look for notices to send, on the monotonic clock; `announced` are those that this process wrote."""
    announced: set[str] = field(default_factory=set)
    pause: float = 0.0
    """Seconds since the last notice that could not be sent, before the next try, which is not before `retry_at`."""
    retry_at: float = 0.0

    @property
    def number(self) -> int:
        return 0 if self.newest is None else self.newest.number

    @property
    def last_run(self) -> str | None:
        return None if self.last is None else self.last.run

    @property
    def failures(self) -> int:
        """Runs that failed in a row. Finding nothing to do is a success; a run that a person stopped counts as none."""
        if self.last is None or self.last.decision == "nothing_new":
            return 0
        if self.end is None:
            return self.last.failures
        return 0 if self.end.status == Status.SUCCEEDED else self.last.failures + self.end.failed

    @property
    def skips(self) -> int:
        """Ticks that were skipped in a row."""
        return 0 if self.newest is None else self.newest.skips

    def accept(self, newest: Tick, last: Tick | None) -> None:
        """Take over a newer decision."""
        if self.last != last:
            self.last, self.end = last, None
        self.newest, self.is_known, self.look_at = newest, True, 0.0


def refresh(store: Store, schedule: str, position: Position) -> None:
    """Bring a position up to date. Raises StoreDamaged."""
    folder = Layout.ticks(schedule)
    start = position.number if position.is_known else _near_the_newest(store, folder)
    listed = store.names(folder, after=_name(start))
    number = max((int(match[1]) for match in map(_NUMBERED.fullmatch, listed) if match), default=start)
    if position.is_known and number == position.number:
        return
    newest = read_tick(store, schedule, number)
    if newest is None:
        position.is_known = True
        return
    same = position.last is not None and newest.last == position.last.number
    last = newest if newest.last == number else position.last if same else read_tick(store, schedule, newest.last)
    position.accept(newest, last)


def decide(
    store: Store, schedule: str, position: Position, tick: datetime, decision: Decision, run: str | None, why: str
) -> Tick | None:
    """Record the decision on a tick, made on what `position` knows; None if somebody has decided since."""
    number = position.number + 1
    waits = decision in {"skip", "missed"}
    record = Tick(
        tick=tick.isoformat(),
        decision=decision,
        run=run,
        previous=position.number,
        why=why,
        latest=max(tick, position.newest.until if position.newest is not None else tick).isoformat(),
        last=number if not waits else position.last.number if position.last is not None else 0,
        failures=position.failures,
        skips=position.skips + (decision == "skip") if waits else 0,
        nonce=environment().token_hex(8),
        who=who(),
        time=now(),
    )
    if not store.create(f"{Layout.ticks(schedule)}/{_name(number)}", encode(record)):
        return None
    position.accept(record, position.last if waits else record)
    return record


def is_decided(store: Store, schedule: str, position: Position, tick: datetime) -> bool:
    """Whether there is a decision on a tick."""
    newest = position.newest
    if newest is None or newest.until < tick:
        return False
    if tick in (newest.due, position.decided):
        return True
    # a clock was set back, or differs from another's
    for earlier in islice(_before(store, schedule, newest.number, _READ_AT_ONCE), _SEARCHED):
        if earlier.due == tick:
            position.decided = tick
            return True
        if earlier.until < tick:
            break
    return False


def record_end(store: Store, schedule: str, number: int, end: End) -> None:
    """Record how the run of a tick ended; the first record counts."""
    store.create(f"{Layout.ends(schedule)}/{_name(number)}", encode(end))


def read_end(store: Store, schedule: str, number: int) -> End | None:
    """Return how the run of a tick ended; None if it has no run, or nobody has seen it end. Raises StoreDamaged."""
    return read_record(store, f"{Layout.ends(schedule)}/{_name(number)}", End)


def read_tick(store: Store, schedule: str, number: int) -> Tick | None:
    """Return a decision; None if there is none with this number. Raises StoreDamaged."""
    name = f"{Layout.ticks(schedule)}/{_name(number)}"
    tick = read_record(store, name, Tick)
    if tick is not None and tick.number != number:
        raise StoreDamaged(f"{store.uri}/{name} is damaged: it is a copy of {_name(tick.number)}")
    return tick


def history(store: Store, schedule: str, position: Position, size: int) -> list[tuple[Tick, End | None]]:
    """Return the newest decisions, newest first, each with the end of the run that it started."""
    ticks = [position.newest] if position.newest is not None else []
    ticks += islice(_before(store, schedule, position.number, size), size - 1)
    names = {tick.number: f"{Layout.ends(schedule)}/{_name(tick.number)}" for tick in ticks}
    read = zip(names.items(), store.read_all([*names.values()], LARGEST_RECORD), strict=True)
    ends = {number: parse_record(store, name, data, End) for (number, name), data in read if data is not None}
    return [(tick, ends.get(tick.number)) for tick in ticks]


def _before(store: Store, schedule: str, number: int, at_once: int) -> Iterator[Tick]:
    """Yield the numbered decisions before a number, newest first, and read `at_once` of them concurrently."""
    folder = Layout.ticks(schedule)
    for end in range(number - 1, 0, -at_once):
        names = [f"{folder}/{_name(each)}" for each in range(end, max(end - at_once, 0), -1)]
        for name, data in zip(names, store.read_all(names, LARGEST_RECORD), strict=True):
            if data is not None:
                yield parse_record(store, name, data, Tick)


def _name(number: int) -> str:
    return f"{number:08d}.json"


def _near_the_newest(store: Store, folder: str) -> int:
    """Return a number with fewer than _FEW decisions after it: 0, or a decision's. Takes O(log n) requests."""

    def exists(number: int) -> bool:
        return store.read(f"{folder}/{_name(number)}") is not None

    low, step = 0, _FEW
    while exists(low + step):
        low, step = low + step, 2 * step
    while step > _FEW:
        step //= 2
        low += step * exists(low + step)
    return low
