"""Text from outside does not steer the terminal that shows it; a pipe gets it as it is."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.engine import runs
from pipelines.recipe.load import parse_pipeline
from pipelines.store import Layout, StoreDamaged, add_event, create_attempt
from pipelines.store.folder import FolderStore
from pipelines.terminal import escape_what_is_no_text, harmless, write
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
    runs.start_run(
        store, parse_pipeline({"name": "one", "stages": stages}, "test"), ("digits",), run_id="one-1-1-1"
    )
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
    escape_what_is_no_text()
    write("a\udcffb")
    assert capsys.readouterr().out == "a\\udcffb\n"


@pytest.mark.slow
def test_a_pipe_gets_the_text_as_it_is(store: FolderStore, vitflow) -> None:  # type: ignore[no-untyped-def]
    assert HOSTILE in vitflow("logs", "one-1-1-1", "--store", store.uri).stdout
    assert HOSTILE in vitflow("report", "query", QUERY, "--csv", "--store", store.uri).stdout


def test_colours_of_a_log_go_as_a_whole() -> None:
    assert harmless("\x1b[36m(worker)\x1b[0m loss\t1\n") == "(worker) loss\t1\n"


def test_a_log_that_is_a_link_out_of_the_store_is_not_followed(
    store: FolderStore,
    vitflow,  # type: ignore[no-untyped-def]
    tmp_path: Path,
) -> None:
    (tmp_path / "secret").write_text("mine")
    name = f"{Layout.attempt('ingest', 'k', 1)}/log.txt"
    (store.root / name).unlink()
    (store.root / name).symlink_to(tmp_path / "secret")
    with pytest.raises(StoreDamaged, match=r"log\.txt is damaged: it is a symbolic link"):
        store.read(name)
    done = vitflow("logs", "one-1-1-1", "--store", store.uri, check=1)
    assert "symbolic link" in done.stderr
    assert "mine" not in done.stdout
