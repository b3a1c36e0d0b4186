"""Cron lines against a walk over all minutes, and against APScheduler."""

import re
from datetime import UTC, date, datetime, time, timedelta
from itertools import islice, takewhile
from zoneinfo import ZoneInfo

import pytest
from apscheduler.triggers.cron import CronTrigger
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.schedules.cron import check_cron, check_timezone, last_tick, ticks
from pipelines.spec import RecipeError

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
LIMITS = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))


@st.composite
def fields(draw: st.DrawFn, low: int, high: int) -> str:
    one, other = sorted(draw(st.tuples(st.integers(low, high), st.integers(low, high))))
    step = draw(st.integers(2, 20))
    kinds = ["*", f"*/{step}", f"{one}", f"{one},{other}", f"{one}-{other}"]
    return draw(st.sampled_from(kinds + [f"{one}-{other}/{step}"] * (one < other)))


@st.composite
def lines(draw: st.DrawFn) -> str:
    minute, hour, day, month, weekday = (draw(fields(low, high)) for low, high in LIMITS)
    month = draw(st.sampled_from(["*", "*", "*", month]))
    if draw(st.booleans()):
        day = "*"
    if day.startswith("*") or weekday.startswith("*") or draw(st.booleans()):
        day, weekday = ("*", weekday) if draw(st.booleans()) else (day, "*")
    return f"{minute} {hour} {day} {month} {weekday}"


def numbers(field: str, low: int, high: int) -> set[int]:
    """An independent reading of a field."""
    found: set[int] = set()
    for part in field.split(","):
        body, _, step = part.partition("/")
        first, _, last = body.partition("-")
        begin, end = (low, high) if body == "*" else (int(first), int(last or first))
        found |= set(range(begin, end + 1, int(step or 1)))
    return found


def on_this_day(line: str, day: date) -> bool:
    _, _, days, months, weekdays = line.split()
    in_days = day.day in numbers(days, 1, 31)
    in_week = day.isoweekday() % 7 in {number % 7 for number in numbers(weekdays, 0, 7)}
    both = days == "*" or weekdays == "*"
    return day.month in numbers(months, 1, 12) and (in_days and in_week if both else in_days or in_week)


def walked(line: str, zone: ZoneInfo, begin: datetime, end: datetime) -> list[datetime]:
    """Every instant in (begin, end], by looking at every minute."""
    minutes, hours = (numbers(field, *limits) for field, limits in zip(line.split(), LIMITS[:2], strict=False))
    found = set()
    if line.split()[0].startswith("*") or line.split()[1].startswith("*"):  # by real time
        moment = begin.replace(second=0, microsecond=0)
        while moment <= end:
            local = moment.astimezone(zone)
            if local.minute in minutes and local.hour in hours and on_this_day(line, local.date()):
                found.add(moment)
            moment += MINUTE
    else:  # fixed times: one that does not exist is the next that does, one that comes twice is the first
        day = begin.astimezone(zone).date() - DAY
        while day <= end.astimezone(zone).date() + DAY:
            for hour in hours if on_this_day(line, day) else ():
                for minute in minutes:
                    naive = datetime.combine(day, time(hour, minute))
                    while naive.replace(tzinfo=zone).astimezone(UTC).astimezone(zone).replace(tzinfo=None) != naive:
                        naive += MINUTE
                    found.add(naive.replace(tzinfo=zone).astimezone(UTC))
            day += DAY
    return sorted(moment for moment in found if begin < moment <= end)


# the days around both changes of the clocks, and some others
moments = st.one_of(
    st.datetimes(datetime(2026, 3, 27), datetime(2026, 3, 30)),
    st.datetimes(datetime(2026, 10, 23), datetime(2026, 10, 26)),
    st.datetimes(datetime(2024, 1, 1), datetime(2032, 1, 1)),
).map(lambda moment: moment.replace(tzinfo=UTC))


@pytest.mark.slow
@settings(max_examples=150)
@given(line=lines(), begin=moments, zone=st.sampled_from(["UTC", "Europe/Berlin", "Australia/Lord_Howe"]))
def test_ticks_are_those_that_a_walk_over_all_minutes_finds(line: str, begin: datetime, zone: str) -> None:
    try:
        checked = check_cron(line)
    except RecipeError as error:
        assert "Bad day-of-month" in str(error)
        assert not walked(line, ZoneInfo("UTC"), datetime(2024, 2, 1, tzinfo=UTC), datetime(2024, 3, 1, tzinfo=UTC))
        return
    end = begin + 2 * DAY
    expected = walked(line, ZoneInfo(zone), begin, end)
    assert list(takewhile(lambda tick: tick <= end, ticks(checked, zone, begin))) == expected
    last = last_tick(checked, zone, begin, end)
    assert last == (expected[-1] if expected else None)


@pytest.mark.parametrize("line", ["0 3 * * MON", "*/7 9-17 * * MON-FRI", "30 12 29 2 *", "0 0 1 */3 *"])
def test_in_utc_they_are_apschedulers(line: str) -> None:
    trigger = CronTrigger.from_crontab(line, UTC)
    at = datetime(2026, 11, 21, tzinfo=UTC)
    for tick in islice(ticks(check_cron(line), "UTC", at), 50):
        at = trigger.get_next_fire_time(None, at + timedelta(seconds=1))
        assert tick == at


def test_one_is_monday_and_sunday_is_both_0_and_7() -> None:
    for field, weekday in (("1", 0), ("0", 6), ("7", 6), ("SUN", 6)):
        assert next(ticks(check_cron(f"0 3 * * {field}"), "UTC", datetime.now(UTC))).weekday() == weekday


def test_the_clocks_of_berlin() -> None:
    def utc(line: str, month: int, day: int, hour: int, count: int) -> list[str]:
        begin = datetime(2026, month, day, hour, tzinfo=UTC)
        return [f"{tick:%d %H:%M}" for tick in islice(ticks(line, "Europe/Berlin", begin), count)]

    assert utc("30 2 * * *", 3, 28, 12, 2) == ["29 01:00", "30 00:30"], "2:30 does not exist: at 3:00"
    assert utc("15,45 2 * * *", 3, 28, 12, 2) == ["29 01:00", "30 00:15"], "both at 3:00, which is once"
    assert utc("30 2 * * *", 10, 24, 12, 2) == ["25 00:30", "26 01:30"], "2:30 comes twice: the first"
    assert utc("30 2 * * *", 10, 25, 1, 1) == ["26 01:30"], "in the second 2:00 hour it has been"
    assert utc("0 * * * *", 10, 24, 23, 3) == ["25 00:00", "25 01:00", "25 02:00"], "every hour is every hour"
    assert utc("0 3 * * *", 3, 28, 12, 2) == ["29 01:00", "30 01:00"]


def test_the_last_tick_may_be_years_ago() -> None:
    now = datetime(2032, 2, 28, 12, tzinfo=UTC)
    since = datetime(2020, 1, 1, tzinfo=UTC)
    assert last_tick("0 0 29 2 *", "UTC", since, now) == datetime(2028, 2, 29, tzinfo=UTC)
    assert last_tick("0 0 29 2 *", "UTC", datetime(2028, 2, 29, tzinfo=UTC), now) is None, "later than since"


@pytest.mark.parametrize(
    ("problem", "lines"),
    [
        ("Bad minute", ["60 * * * *", "*/0 * * * *", "١ * * * *", "0,, 3 * * *"]),
        ("Bad hour", ["0 25 * * *", "0 9-5 * * *"]),
        ("Bad day-of-month", ["* * 0 * *", "0 0 30 2 *"]),
        ("Bad day-of-week", ["* * * * MOM", "0 0 * * *;ls"]),
        ("Wrong number of fields", ["@daily", "0 3 * *", ""]),
        (
            "programs read this line differently",
            ["0 0 L * *", "0 0 * * 5#2", "0 0 3 * * *", "5/15 * * * *", "0 0 1-1/2 * *", "0 0 */2 * 1"],
        ),
    ],
)
def test_what_is_no_cron_line(problem: str, lines: list[str]) -> None:
    for line in lines:
        with pytest.raises(RecipeError, match=re.escape(f"--cron {line!r}: {problem}; expected five fields")):
            check_cron(line)


def test_july_is_not_the_last_day() -> None:
    assert check_cron(" 0 0  1 jul-aug * ") == "0 0 1 JUL-AUG *"


@pytest.mark.parametrize(
    "name",
    [
        "Europe/Berln",
        "Berlin",
        "",
        "../etc/passwd",
        "localtime",
        "Factory",
        "right/Europe/Berlin",
        "posix/Europe/Berlin",
    ],
)
def test_a_time_zone_is_the_same_one_everywhere_and_the_nearest_is_named(name: str) -> None:
    with pytest.raises(RecipeError, match=f"'{name}': no such time zone; .* such as '(Europe/Berlin|Etc/UTC|UTC)'"):
        check_timezone(name)
    assert check_timezone("EST5EDT") == "EST5EDT"
