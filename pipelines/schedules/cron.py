"""Cron lines: validated, and turned into times.

A line has cron's five fields and nothing that only some programs support, so it means the same to `vitflow schedule
serve`, systemd and Kubernetes. When the clocks change, it behaves as in Debian's cron: a fixed time that does not exist
is due right after the change, and one that occurs twice is due the first time; a line whose minute or hour begins with
`*` follows elapsed time.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from pipelines.spec import RecipeError

_MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
_FIELDS: tuple[tuple[str, int, int, tuple[str, ...]], ...] = (
    ("minute", 0, 59, ()),
    ("hour", 0, 23, ()),
    ("day of month", 1, 31, ()),
    ("month", 1, 12, _MONTHS),
    ("day of week", 0, 7, _DAYS),
)
_ITEM = re.compile(r"(?:\*|([A-Z0-9]+)(?:-([A-Z0-9]+))?)(?:/([0-9]+))?")


def check_cron(cron: str) -> str:
    """Return the line with single spaces, in capitals.

    Raises:
        RecipeError: the line is invalid; the message names the field and what is expected.
    """
    fields = cron.upper().split()
    if len(fields) != len(_FIELDS):
        raise RecipeError(
            f"--cron {cron!r}: {len(fields)} fields; expected five, minute hour day-of-month month day-of-week, "
            "such as '0 3 * * 1' for Mondays at 3:00"
        )
    for text, (name, low, high, names) in zip(fields, _FIELDS, strict=True):
        if problem := _problem(text, low, high, names):
            raise RecipeError(f"--cron {cron!r}: {name}: {problem}")
    days, weekdays = fields[2], fields[4]
    if days != "*" and weekdays != "*" and (days.startswith("*") or weekdays.startswith("*")):
        raise RecipeError(
            f"--cron {cron!r}: day of month {days} with day of week {weekdays} means 'both' to some programs and "
            "'either' to others; write the days of the field with * as a list"
        )
    line = " ".join(fields)
    try:
        next(CronSim(line, datetime(2024, 1, 1, tzinfo=UTC)))
    except (CronSimError, StopIteration):
        raise RecipeError(
            f"--cron {cron!r}: day of month: {days} does not occur in month {fields[3]}"
        ) from None
    return line


def _problem(text: str, low: int, high: int, names: tuple[str, ...]) -> str | None:
    """Return what is wrong with a field; None if it is valid."""
    for item in text.split(","):
        match = _ITEM.fullmatch(item)
        if match is None:
            return f"invalid value {item!r}; expected *, a number, a range ({low}-{high}), or these with a step (*/2)"
        first, last, step = match.groups()
        numbers = []
        for value in (first, last):
            if value is None:
                continue
            if value in names:
                numbers.append(names.index(value) + low)
            elif value.isdigit() and low <= int(value) <= high:
                numbers.append(int(value))
            else:
                near = difflib.get_close_matches(value, names, n=1)
                or_names = f" or {names[0]} to {names[-1]}" if names else ""
                return f"{value!r} is not from {low} to {high}{or_names}" + (
                    f"; did you mean {near[0]}?" if near else ""
                )
        if len(numbers) == 2 and numbers[0] > numbers[1]:
            return f"{item} runs backwards; write {last}-{first}, or two parts with a comma"
        if step is not None and (int(step) == 0 or len(set(numbers)) == 1):
            begin = first or low
            return f"{item}: a step must be 1 or more and follow * or a range, as in {begin}-{high}/2"
    return None


_OF_A_MACHINE = ("localtime", "posixrules", "Factory")


def check_timezone(name: str) -> str:
    """Return the name of a time zone that is the same one on every machine.

    Raises:
        RecipeError: there is no such time zone; the message offers the nearest name.
    """
    folder, _, zone = name.partition("/")
    if folder in {"posix", "right"}:  # right has leap seconds, by which its times are off
        raise RecipeError(f"--timezone {name!r}: not a name of its own; use {zone or 'UTC'!r}")
    if name in _OF_A_MACHINE:
        raise RecipeError(
            f"--timezone {name!r}: depends on the machine; expected a name such as Europe/Berlin or UTC"
        )
    return known_timezone(name)


def known_timezone(name: str) -> str:
    """Return the name of a time zone that this machine has. Raises RecipeError otherwise."""
    try:
        ZoneInfo(name)
    except (ValueError, OSError, KeyError):  # ZoneInfoNotFoundError is a KeyError
        zones = {zone.lower(): zone for zone in sorted(available_timezones() - {*_OF_A_MACHINE})}
        if not zones:
            raise RecipeError(
                f"--timezone {name}: this machine has no time zones; install tzdata (apt-get or pip)"
            ) from None
        near = [zone for low, zone in zones.items() if name and low.endswith(name.lower())] or [
            zones[low] for low in difflib.get_close_matches(name.lower(), zones, n=1)
        ]
        hint = (
            f"did you mean {min(near, key=len)!r}?"
            if near
            else "expected a name such as Europe/Berlin or UTC"
        )
        raise RecipeError(f"--timezone {name!r}: no such time zone; {hint}") from None
    return name


def ticks(cron: str, timezone: str, after: datetime) -> Iterator[datetime]:
    """Yield the times of a checked line after `after`, in UTC, each once."""
    for local in CronSim(cron, after.astimezone(ZoneInfo(timezone))):
        tick = local.astimezone(UTC)
        if tick > after:  # in the second pass of a repeated hour, CronSim yields the first pass again
            yield tick


def last_tick(cron: str, timezone: str, since: datetime, now: datetime) -> datetime | None:
    """Return the latest time that is later than `since` and not later than `now`; None if there is none."""
    begin = (now + timedelta(minutes=1)).astimezone(ZoneInfo(timezone))
    latest = next(local.astimezone(UTC) for local in CronSim(cron, begin, reverse=True) if local <= now)
    return latest if latest > since else None
