"""Cron lines: validated, and turned into times.

A line has cron's five fields and no syntax that only some programs support, so `vitflow schedule serve`, cron and
Kubernetes agree on it. When the clocks change, it behaves as in Debian's cron: a fixed time that does not exist is due
right after the change, and a time that occurs twice is due the first time; a line whose minute or hour begins with `*`
follows elapsed time.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from pipelines.spec import RecipeError

_EXPECTED = (
    "expected five fields, minute (0-59) hour (0-23) day-of-month (1-31) month (1-12) day-of-week (0-7 or SUN-SAT), "
    "each *, a number, a range such as 1-5, * or a range with a step (*/2), or several of them with commas; "
    "'0 3 * * 1' is Mondays at 3:00"
)
# L (last day), 5#2 (second Friday), and a step after a single number or a range of one.
_OF_SOME_PROGRAMS = re.compile(r"(?<!JU)L|#|(^|[ ,])\w+/|\b(\w+)-\2/")
_OF_A_MACHINE = {"localtime", "posixrules", "Factory", "posix", "right"}


def check_cron(cron: str) -> str:
    """Return the line with single spaces, in capitals.

    Raises:
        RecipeError: the line is invalid, or programs read it differently; the message says what is expected.
    """
    fields = cron.upper().split()
    line = " ".join(fields)
    try:
        CronSim(line, datetime(2024, 1, 1, tzinfo=UTC))
    except CronSimError as error:
        raise RecipeError(f"--cron {cron!r}: {error}; {_EXPECTED}") from None
    # If one day field is such as */2, some programs require both day fields to match and others either.
    days = sorted(fields[index] for index in (2, -1))
    has_two_days = days[0] != "*" != days[1] and days[0].startswith("*")
    if len(fields) != 5 or _OF_SOME_PROGRAMS.search(line) or has_two_days:
        raise RecipeError(f"--cron {cron!r}: programs read this line differently; {_EXPECTED}")
    return line


def check_timezone(name: str) -> str:
    """Return the name of a time zone that means the same on every machine.

    Raises:
        RecipeError: there is no such time zone here; the message offers the nearest name.
    """
    try:
        ZoneInfo(name)
        is_known = name.split("/")[0] not in _OF_A_MACHINE
    except (ValueError, OSError, KeyError):  # ZoneInfoNotFoundError is a KeyError
        is_known = False
    if not is_known:
        near = difflib.get_close_matches(name, sorted(available_timezones() - _OF_A_MACHINE), n=1)
        raise RecipeError(
            f"--timezone {name!r}: no such time zone; expected a name of the tz database (package tzdata), "
            f"such as {near[0] if near else 'Europe/Berlin'!r}"
        )
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
