"""Cron lines: read strictly, turned into instants, and written for systemd.

Five fields as cron has them, and nothing that only some programs know: a line means the same to `vitflow schedule
serve`, systemd and Kubernetes. Around a change of the clocks it is as in Debian's cron: a fixed time that does not
exist is taken as soon as the clock goes on, one that comes twice is taken the first time; a line whose minute or hour
begins with `*` goes by real time.
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
# looked through one after the other for the last time that was due: leap days are up to eight years apart
_BACK = tuple(timedelta(days=days) for days in (1 / 24, 1, 8, 32, 367, 8 * 366))


def check_cron(cron: str) -> str:
    """The line, with single spaces, in capitals.

    Raises:
        RecipeError: it is none; the message names the field and what would be right.
    """
    fields = cron.upper().split()
    if len(fields) != len(_FIELDS):
        raise RecipeError(
            f"--cron {cron!r}: {len(fields)} fields; write five, minute hour day-of-month month day-of-week, "
            "as in '0 3 * * 1' for Mondays at 3:00"
        )
    for text, (name, low, high, names) in zip(fields, _FIELDS, strict=True):
        if problem := _problem(text, low, high, names):
            raise RecipeError(f"--cron {cron!r}: {name}: {problem}")
    days, weekdays = fields[2], fields[4]
    if days != "*" and weekdays != "*" and (days.startswith("*") or weekdays.startswith("*")):
        raise RecipeError(
            f"--cron {cron!r}: day of month {days} beside day of week {weekdays} means 'both' to one program and "
            "'either' to another: write the days of the one with * as a list"
        )
    line = " ".join(fields)
    try:
        next(CronSim(line, datetime(2024, 1, 1, tzinfo=UTC)))
    except (CronSimError, StopIteration):
        raise RecipeError(
            f"--cron {cron!r}: day of month: {days} does not come in month {fields[3]}"
        ) from None
    return line


def _problem(text: str, low: int, high: int, names: tuple[str, ...]) -> str | None:
    """What is wrong with a field."""
    for item in text.split(","):
        found = _ITEM.fullmatch(item)
        if found is None:
            return f"{item!r} is none of: *, a number, a range as in {low}-{high}, * or a range with a step as in */2"
        first, last, step = found.groups()
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
                known = f" or {names[0]} to {names[-1]}" if names else ""
                return f"{value!r} is not from {low} to {high}{known}" + (
                    f"; did you mean {near[0]}?" if near else ""
                )
        if len(numbers) == 2 and numbers[0] > numbers[1]:
            return f"{item} runs backwards; write {last}-{first}, or two parts with a comma"
        if step is not None and (int(step) == 0 or len(set(numbers)) == 1):
            begin = first or low
            return f"{item}: a step is 1 or more, behind * or a range, as in {begin}-{high}/2"
    return None


def check_timezone(name: str) -> str:
    """The name of a time zone.

    Raises:
        RecipeError: there is none of that name; the message has the nearest.
    """
    try:
        ZoneInfo(name)
    except (ValueError, OSError, KeyError):  # ZoneInfoNotFoundError is a KeyError
        known = {zone.lower(): zone for zone in sorted(available_timezones())}
        if not known:
            raise RecipeError(
                f"--timezone {name}: this machine has no time zones: install tzdata (apt-get or pip)"
            ) from None
        near = [zone for low, zone in known.items() if name and low.endswith(name.lower())] or [
            known[low] for low in difflib.get_close_matches(name.lower(), known, n=1)
        ]
        right = f"did you mean {min(near, key=len)!r}?" if near else "write it as in Europe/Berlin, or UTC"
        raise RecipeError(f"--timezone {name!r}: no such time zone; {right}") from None
    return name


def ticks(cron: str, timezone: str, after: datetime) -> Iterator[datetime]:
    """The instants of a checked line, in UTC, later than `after`, each once."""
    for local in CronSim(cron, after.astimezone(ZoneInfo(timezone))):
        tick = local.astimezone(UTC)
        if tick > after:  # in the second pass of an hour that comes twice, the first is found again
            yield tick


def last_tick(cron: str, timezone: str, since: datetime, now: datetime) -> datetime | None:
    """The latest instant that is later than `since` and not later than `now`."""
    for back in _BACK:
        found = None
        for tick in ticks(cron, timezone, max(since, now - back)):
            if tick > now:
                break
            found = tick
        if found is not None or now - back <= since:
            return found
    return None


def on_calendar(cron: str, timezone: str) -> list[str]:
    """The same for systemd's OnCalendar=: one line, or two where cron's two fields of days mean 'either'.

    What systemd does not do is take a time that does not exist when the clocks change: it leaves that day out.
    """
    sim = CronSim(cron, datetime(2024, 1, 1, tzinfo=UTC))
    minutes, hours = _listed(sim.minutes, 60), _listed(sim.hours, 24)
    months, days = _listed(sim.months, 12), _listed(sim.days, 31)
    weekdays = sorted({number % 7 for number in sim.weekdays if isinstance(number, int)})
    named = "" if len(weekdays) == 7 else ",".join(_DAYS[number].title() for number in weekdays) + " "
    time = f"{hours}:{minutes}:00 {timezone}"
    if named and days != "*" and not sim.day_and:
        return [f"*-{months}-{days} {time}", f"{named}*-{months}-* {time}"]
    return [f"{named}*-{months}-{days} {time}"]


def _listed(numbers: set[int], all_of_them: int) -> str:
    return "*" if len(numbers) == all_of_them else ",".join(f"{number:02d}" for number in sorted(numbers))


def kubernetes_cron(cron: str) -> str:
    """The same for Kubernetes, to which Sunday is 0 alone."""
    *fields, weekdays = cron.split()
    if "7" in weekdays:
        sim = CronSim(cron, datetime(2024, 1, 1, tzinfo=UTC))
        weekdays = ",".join(
            map(str, sorted({number % 7 for number in sim.weekdays if isinstance(number, int)}))
        )
    return " ".join([*fields, weekdays])
