"""Tables for people on a terminal of any width, and for programs that read a pipe."""

import io
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from pipelines import terminal
from pipelines.commands import common
from pipelines.commands.ending import OF_IMAGES
from pipelines.commands.inspect import _took
from pipelines.results.sql.columns import TABLES

RUN = "quickstart-20261122-101500-ab12"
KEY = "0123456789ab"
ROWS = [
    {"key": KEY + "cdef", "stage": "finetune_all@seed=0", "title": f"{number} " + "word " * 20, "run": RUN}
    for number in range(2)
]
COLUMNS = ("key", "stage", "title", "run")


def printed(monkeypatch: pytest.MonkeyPatch, width: int, rows: list[dict[str, str]]) -> list[str]:
    """The table's lines, as a terminal of this width gets them."""
    console = Console(width=width, file=io.StringIO())
    monkeypatch.setattr(common, "console", console)
    monkeypatch.setattr(terminal, "console", lambda width: Console(width=width, file=console.file))
    common.print_table(rows, COLUMNS)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [30, 60, 80, 100])
def test_no_id_is_split_on_a_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    other = {**ROWS[1], "key": "f" * 16, "stage": "probe", "run": RUN[:-1] + "3"}
    text = "\n".join(printed(monkeypatch, width, [ROWS[0], other]))
    for shown in (KEY, "f" * 12, "finetune_all@seed=0", RUN, other["run"]):
        assert shown in text


def test_text_is_folded_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(monkeypatch, 100, [ROWS[0], {**ROWS[1], "key": "f" * 16, "stage": "x", "run": RUN[:-1]}])
    assert len(lines) > 3 and all(len(line) <= 100 for line in lines)


def test_a_table_without_rows_is_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [line.split() for line in printed(monkeypatch, 80, [])] == [list(COLUMNS)]


def test_in_a_pipe_a_row_is_a_line(vitflow) -> None:  # type: ignore[no-untyped-def]
    lines = vitflow("report", "query", "--tables", COLUMNS="").stdout.splitlines()
    assert len(lines) == 1 + sum(map(len, TABLES.values()))
    assert max(map(len, lines)) > 80


def test_a_running_stage_shows_its_age() -> None:
    began = datetime(2026, 11, 22, 10, tzinfo=UTC)
    stage = {"status": "RUNNING", "started": began.isoformat(), "changed": began.isoformat()}
    assert _took(stage, began + timedelta(hours=26, seconds=5)) == "for 1 day, 2:00:05"
    ended = stage | {"status": "SUCCEEDED", "changed": (began + timedelta(seconds=3)).isoformat()}
    assert _took(ended, began + timedelta(hours=26)) == "0:00:03"
    assert _took({"status": "PENDING"}, began) == ""


def test_the_commands_that_a_run_ends_with_read_columns_that_exist() -> None:
    for columns, table in OF_IMAGES.values():
        assert {*columns.split(", ")} <= {column.name for column in TABLES[table]}


@pytest.mark.parametrize(("value", "text"), [(-1e-9, "0.0000"), (-0.25, "-0.2500"), (7, "7")])
def test_no_number_is_minus_zero(value: float, text: str) -> None:
    assert common._cell("mean", value) == text
