"""What a person sees where output is a file: plain lines, without Ray's own chatter."""

import io

import pytest
from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table

from pipelines.commands.ending import time_line
from pipelines.engine.display import RunDisplay, in_words
from pipelines.engine.status import Status
from pipelines.store import ProgressLine


def progress(done: int, total: int) -> str:
    return ProgressLine(done=done, total=total, unit="step").encode()


def shown(*lines: str, verbose: bool = True) -> str:
    console = Console(file=io.StringIO(), width=200)
    with RunDisplay(console, width=8, verbose=verbose) as display:
        display.stage("pretrain", Status.RUNNING)
        for line in lines:
            display.line("pretrain", line)
        display.stage("pretrain", Status.SUCCEEDED, "abc[0]")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_lines_lose_colours_and_the_workers_prefix_and_keep_brackets() -> None:
    text = shown("\x1b[36m(RayTrainWorker pid=12, ip=127.0.0.1)\x1b[0m loss [1/2]")
    assert "pretrain  loss [1/2]\n" in text
    assert "abc[0]" in text


def test_the_libraries_own_lines_are_left_out_and_their_warnings_are_not() -> None:
    text = shown(
        "2026-11-21 09:13:29,146\tINFO job_manager.py:581 -- Runtime env is setting up.",
        "Running entrypoint for job x: exec python",
        "(RayTrainWorker pid=12) DeepSpeed deepspeed.ops.comm.deepspeed_shm_comm_op built successfully",
        "(RayTrainWorker pid=12) DeepSpeed could not load an op",
    )
    assert [line.split("  ")[-1] for line in text.splitlines()[1:-1]] == ["DeepSpeed could not load an op"]


def test_progress_is_thinned_out_and_errors_are_not() -> None:
    text = shown(*(progress(step, 9) for step in range(9)), *["error: x"] * 3)
    assert text.count("step 0/9") == text.count("step") == 1
    assert text.count("error: x") == 3


def test_without_logs_a_stage_is_one_line_and_its_warnings() -> None:
    text = shown("loss [1/2]", "warning: quarantined 1", progress(3, 9), "error: x", verbose=False)
    assert [line.split()[1] for line in text.splitlines()] == ["warning:", "error:", "SUCCEEDED"]


def test_a_stage_has_one_duration_over_its_attempts_in_its_line_and_in_the_runs_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    console = Console(file=io.StringIO(), width=200)
    display = RunDisplay(console, width=8)
    for seconds, name, status in (
        (0, "images", Status.RUNNING),
        (28, "images", Status.SUCCEEDED),
        (30, "vit", Status.RUNNING),
        (630, "vit", Status.LOST),
        (640, "vit", Status.RUNNING),
        (1317, "vit", Status.STOPPED),
    ):
        clock[0] = seconds
        display.stage(name, status)
    assert isinstance(console.file, io.StringIO)
    ended = [line.split() for line in console.file.getvalue().splitlines()]
    assert ended[0] == ["images", "SUCCEEDED", "0:00:28"] and ended[-1] == ["vit", "STOPPED", "0:21:27"]
    assert time_line(1320, display.took) == "took 0:22:00; longest: vit 0:21:27, images 0:00:28"


def test_the_bar_and_the_logs_are_functions_of_the_record() -> None:
    """Numbers in a stage's own words are no progress, and a line that only looks like a record stays as it is."""
    display = RunDisplay(Console(file=io.StringIO(), width=200), width=8)
    display.stage("pretrain", Status.RUNNING)
    for line in (f"(pid=3, ip=127.0.0.1) {progress(3, 12)}", "loss [1/2]", 'progress {"done": 1}'):
        display.line("pretrain", line)
    assert display.running["pretrain"] == ProgressLine(done=3, total=12, unit="step")
    table = display._table()
    assert isinstance(table, Table)
    bar = next(iter(table.columns[3].cells))
    assert isinstance(bar, ProgressBar) and (bar.completed, bar.total) == (3, 12)
    assert in_words(f"(pid=3, ip=127.0.0.1) {progress(3, 12)}") == "step 3/12"
    assert in_words("progress step 3/12") == "progress step 3/12"  # of an earlier version
    assert in_words('progress {"done": 1}') == 'progress {"done": 1}'


def test_on_a_terminal_a_running_stage_is_one_line_and_nothing_scrolls() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=60)
    with RunDisplay(console, width=8) as display:
        display.stage("pretrain", Status.RUNNING)
        display.line("pretrain", "x" * 500)
        display.live.refresh()
        display.stage("pretrain", Status.SUCCEEDED)
        for _ in range(9):
            display.live.refresh()
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.count("\n") == 2, "the stage that ended, and the end of the display"
    assert "pretrain     0 s" in text and "x" * 99 not in text
