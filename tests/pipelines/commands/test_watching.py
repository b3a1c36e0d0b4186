"""The commands that follow a run's trainings: `tensorboard`, with the real one over HTTP, and `status --watch`."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import urlopen

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipelines.engine.history import end_run
from pipelines.engine.runs import driver_process
from pipelines.store import Store, add_event, open_store
from tests.support.clusters import wait_for
from tests.support.trainings import RUN, line, put_lines, put_run

pytestmark = pytest.mark.slow


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = open_store(str(tmp_path / "s"))
    put_run(store, digits="SUCCEEDED", pretrain="RUNNING", finetune="PENDING")
    add_event(store, RUN, "driver", **driver_process())
    return store


@contextmanager
def running(*arguments: str | Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command, which has ended after the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pipelines", *map(str, arguments)],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # as a terminal's foreground job, which does not ignore Ctrl-C
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def first(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """Wait for the first line in which the pattern is found."""
    assert process.stdout is not None
    for text in process.stdout:
        if found := re.search(pattern, text):
            return found
    raise AssertionError(process.communicate()[1])


def scalars(url: str, run: str, tag: str) -> list[Any]:
    """Ask TensorBoard for (step, value) of a curve."""
    query = urlencode({"run": run, "tag": tag})
    try:
        with urlopen(f"{url}data/plugin/scalars/scalars?{query}", timeout=30) as answer:
            return [(step, round(value, 4)) for _, step, value in json.load(answer)]
    except HTTPError:  # it has not read this curve yet
        return []


def test_tensorboard_follows_the_run_on_loopback_only_and_leaves_nothing(store: Store, tmp_path: Path) -> None:
    (scratch := tmp_path / "scratch").mkdir()
    put_lines(store, "pretrain", line(5), line(10), line(20, dev_accuracy=0.5))
    arguments = ("tensorboard", RUN, "--store", store.uri, "--port", "0")
    with running(*arguments, TMPDIR=str(scratch)) as process:
        url = first(process, r"(http://127\.0\.0\.1:\d+/) ").group(1)
        wait_for(lambda: scalars(url, "pretrain", "train/loss") == [(5, 0.2), (10, 0.1), (20, 0.05)], 30)
        assert scalars(url, "pretrain", "dev/accuracy") == [(20, 0.5)]
        put_lines(store, "pretrain", line(20, loss=0.25), attempt=2, start=10)
        put_lines(store, "finetune", line(5, "trial-1-0"))
        add_event(store, RUN, "stage", stage="finetune", status="RUNNING", key="finetune")
        wait_for(lambda: scalars(url, "pretrain", "train/loss") == [(5, 0.2), (10, 0.1), (20, 0.25)], 30)
        assert scalars(url, "pretrain", "dev/accuracy") == []
        wait_for(lambda: scalars(url, "finetune/learning rate 0.001", "train/loss") == [(5, 0.2)], 30)
        listening = [
            connection.laddr.ip
            for connection in psutil.Process(process.pid).net_connections()
            if connection.status == psutil.CONN_LISTEN
        ]
        assert listening == ["127.0.0.1"]
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
        assert process.returncode == 0 and "Traceback" not in said
    assert not [*scratch.iterdir()]


def test_tensorboard_keeps_event_files_that_another_reader_sees_grow(store: Store, tmp_path: Path) -> None:
    def steps() -> list[int]:
        reader = EventAccumulator(str(tmp_path / "kept" / RUN / "pretrain")).Reload()
        return [event.step for event in reader.Scalars("train/loss")] if reader.Tags()["scalars"] else []

    put_lines(store, "pretrain", line(5), line(10))
    arguments = ("tensorboard", RUN, "--store", store.uri, "--port", "0", "--to", tmp_path / "kept")
    with running(*arguments) as process:
        first(process, r"http://")
        assert steps() == [5, 10]
        put_lines(store, "pretrain", line(20), number=2)
        wait_for(lambda: steps() == [5, 10, 20], 30)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert steps() == [5, 10, 20]
    (tmp_path / "kept" / "taken").write_text("")
    with running(*arguments[:-1], tmp_path / "kept" / "taken") as process:
        assert "is a file" in process.communicate(timeout=30)[1] and process.returncode == 2


def test_a_port_that_is_taken_is_the_users_mistake(vitflow, store: Store) -> None:  # type: ignore[no-untyped-def]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = vitflow("tensorboard", "--store", store.uri, "--port", port, check=2)
    assert "--port: " in done.stderr and str(port) in done.stderr


def test_without_tensorboard_it_says_how_to_install_it(vitflow, store: Store, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    absent = "raise ModuleNotFoundError(\"No module named 'tensorboard'\", name='tensorboard')\n"
    (tmp_path / "tensorboard.py").write_text(absent)
    done = vitflow("tensorboard", "--store", store.uri, check=2, PYTHONPATH=str(tmp_path))
    assert "tensorboard is not installed" in done.stderr and "pip install tensorboard" in done.stderr


def test_status_watches_until_the_run_has_ended(store: Store) -> None:
    put_lines(store, "pretrain", line(10))
    with running("status", "--watch", "--store", store.uri) as process:
        assert first(process, r"^pretrain  RUNNING  (.*)").group(1).startswith("step 10/40 (25%)")
        put_lines(store, "pretrain", line(20), number=2)
        assert first(process, r"^pretrain  RUNNING  (.*)").group(1).startswith("step 20/40 (50%)")
        end_run(store, RUN, "FAILED")
        assert first(process, f"^{RUN}  FAILED")
        assert process.wait(30) == 0
