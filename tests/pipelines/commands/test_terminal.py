"""Text from outside does not steer the terminal that shows it; a pipe gets data as they are; closing it is Ctrl-C."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.engine import runs
from pipelines.recipe.load import parse_pipeline
from pipelines.store import Layout, add_event, create_attempt
from pipelines.store.folder import FolderStore
from pipelines.terminal import ends_once, escape_invalid_text, write
from tests.support.records import make_attempt

HOSTILE = "a\x1b]0;renamed\x07\x1b[2Jb\x9b31mc\u202ed"
LEFT = "a]0;renamed[2Jb31mcd"


def on_terminal(*arguments: str | Path) -> str:
    """All that a command writes to a terminal."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "pipelines", *map(str, arguments)], stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    said = b""
    try:
        while data := os.read(master, 65536):
            said += data
    except OSError:  # Linux: nobody has the other end open
        pass
    os.close(master)
    process.wait(30)
    return said.decode()


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    """A store with one run of one stage, whose log is hostile."""
    store = FolderStore(tmp_path / "s")
    stages = {"digits": {"job": "ingest", "source": {"kind": "digits"}}}
    runs.start_run(store, parse_pipeline({"name": "one", "stages": stages}, "test"), ("digits",), run_id="one-1-1-1")
    add_event(store, "one-1-1-1", "stage", stage="digits", status="SUCCEEDED", key="k")
    create_attempt(store, make_attempt(run="one-1-1-1"))
    store.create(f"{Layout.attempt('ingest', 'k', 1)}/log.txt", HOSTILE.encode())
    return store


QUERY = f"SELECT {' || '.join(f'chr({ord(character)})' for character in HOSTILE)} AS x"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("logs", "one-1-1-1"),
        ("report", "query", QUERY),
        ("report", "query", QUERY, "--csv"),
        ("report", "query", QUERY, "--json"),
        ("run", f"{HOSTILE}.yaml"),
    ],
    ids=["logs", "table", "csv", "json", "error"],
)
def test_control_characters_stay_out_of_a_terminal(store: FolderStore, arguments: tuple[str, ...]) -> None:
    said = on_terminal(*arguments, "--store", store.uri)
    assert "renamed" in said and "cd" in said
    assert not {"\x07", "\x9b", "\u202e"} & set(said)
    assert "\x1b]" not in said and "\x1b[2J" not in said
    if "--json" not in arguments:  # which spells most of them itself
        assert LEFT in said


def test_a_name_that_is_not_utf_8_is_printed_with_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    escape_invalid_text()
    write("a\udcffb")
    assert capsys.readouterr().out == "a\\udcffb\n"


@pytest.mark.slow
def test_a_pipe_gets_data_as_it_is(store: FolderStore, vitflow) -> None:  # type: ignore[no-untyped-def]
    assert HOSTILE in vitflow("report", "query", QUERY, "--csv", "--store", store.uri).stdout


def test_a_pipe_gets_logs_without_colours_and_without_what_ray_prints_in_every_job(
    store: FolderStore, vitflow_here
) -> None:  # type: ignore[no-untyped-def]
    log = [
        "2026-01-01 00:00:00,000\tINFO job_manager.py:581 -- Runtime env is setting up.",
        "Running entrypoint for job ingest-k-1: exec python",
        "\x1b[36m(Worker pid=7)\x1b[0m one",
        "(Worker pid=7, ip=10.0.0.1) DeepSpeed comm built successfully",
        "",
        "two",
    ]
    (store.root / f"{Layout.attempt('ingest', 'k', 1)}/log.txt").write_text("\n".join(log))
    said = vitflow_here("logs", "one-1-1-1", "--store", store.uri).stdout
    assert said == "--- digits (attempt 1, SUCCEEDED)\n(Worker pid=7) one\n\ntwo\n"


CLOSED = """
import sys, time
from pathlib import Path
from pipelines.terminal import ends_once
with ends_once():
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print("there is nobody to read this", flush=True)
        Path(sys.argv[1]).write_text("stopped")
"""


def test_who_prints_when_the_terminal_is_closed_can_still_clean_up(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", CLOSED, str(tmp_path / "end")])
    assert os.read(terminal, 5) == b"ready"
    os.close(terminal)
    os.waitpid(pid, 0)
    assert (tmp_path / "end").read_text() == "stopped"


def test_under_nohup_a_closed_terminal_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ends_once():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
