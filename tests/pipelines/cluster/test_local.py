"""The shared local Ray and its keeper: shared, closed to strangers, adopted, replaced when dead, and gone when idle."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipelines.cluster import head, local
from pipelines.cluster.head import Head, LocalRayError, processes_of, read_head
from pipelines.cluster.local import LocalConnection, hold, shut_down
from tests.support.clusters import wait_for

pytestmark = pytest.mark.ray
IDLE_SECONDS = 3.0
SHOW = "from pipelines.cluster.local import hold\nwith hold() as ray: print(ray.session_name)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state folder of our own, by the environment, as for processes that are started."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("VITFLOW_RAY_DIR", str(home / "ray"))
        patch.setenv("VITFLOW_RAY_IDLE_SECONDS", str(IDLE_SECONDS))
        yield home / "ray"
        assert shut_down()


def present(folder: Path) -> Head:
    head = read_head(folder)
    assert head is not None
    return head


until = partial(wait_for, seconds=20.0)


def keeper(folder: Path) -> int:
    return int((folder / "keeper.lock").read_text())


def gone(head: Head) -> bool:
    return not processes_of(head) and not Path(head.temp_folder).exists()


def open_files_of_nobody(head: Head) -> bool:
    """Told without the module's own idea of what belongs to a Ray."""
    for process in psutil.process_iter():
        try:
            if any(file.path.startswith(head.temp_folder) for file in process.open_files()):
                return False
        except psutil.Error:
            continue
    return True


def asked(
    processes: list[psutil.Process], question: Callable[[psutil.Process], Any]
) -> list[tuple[psutil.Process, Any]]:
    """Each process with its answer, but those that have ended since they were listed."""
    answers = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            answers.append((process, question(process)))
    return answers


def marked_with(folder: Path, process: psutil.Process) -> bool:
    """Whether a process was started for this state folder; told without head.json, which is gone."""
    try:
        return process.pid != os.getpid() and process.environ().get("RAY_AUTH_TOKEN_PATH") == str(folder / "token")
    except psutil.Error:
        return False


def test_two_that_start_at_once_get_one_head_without_what_is_only_theirs(folder: Path) -> None:
    """Both were started by launchers of parallel programs, and in a shell that changes how Python runs."""
    theirs = {
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "SLURM_PROCID": "3",
        "PMI_RANK": "1",
        "RANK": "3",
        "WORLD_SIZE": "4",
    }
    theirs |= {
        "RAY_TRAIN_V2_ENABLED": "0",
        "PYTHONOPTIMIZE": "1",
        "PYTHONWARNINGS": "error",
        "RAY_ADDRESS": "h:1",
    }
    started = [
        subprocess.Popen([sys.executable, "-c", SHOW], stdout=subprocess.PIPE, text=True, env=os.environ | theirs)
        for _ in range(2)
    ]
    sessions = {process.communicate(timeout=90)[0].strip() for process in started}
    assert len(sessions) == 1
    with hold() as ray:
        assert {ray.session_name} == sessions
        assert present(folder).address == ray.address
        passed_on = psutil.Process(present(folder).pids["raylet"]).environ()
        assert {name: passed_on[name] for name in theirs if name in passed_on} == {"RAY_TRAIN_V2_ENABLED": "1"}
    assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600
    assert stat.S_IMODE(Path(present(folder).temp_folder).stat().st_mode) == 0o700


def test_it_has_all_cpus(folder: Path) -> None:
    with hold() as ray:
        code = "import ray; ray.init(); print(ray.cluster_resources()['CPU'])"
        client, address = head.client_environment(ray.token_path), present(folder).gcs_address
        environment = {**os.environ, **client, "RAY_ADDRESS": address}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert float(done.stdout) == os.cpu_count()


def test_it_is_not_ended_while_it_is_used(folder: Path) -> None:
    with hold() as ray:
        time.sleep(IDLE_SECONDS + 2.0)
        assert not shut_down()
        assert ray.cluster().session_name == ray.session_name
        assert ray.ensure_head() is ray


def test_a_killed_keepers_ray_is_adopted(folder: Path) -> None:
    with hold() as ray:
        first = keeper(folder)
        os.kill(first, signal.SIGKILL)
        until(lambda: not local._locked(folder / "keeper.lock"))
        ray.ensure_keeper()
        assert keeper(folder) != first
        assert ray.cluster().session_name == ray.session_name
        assert ray.ensure_head() is ray
        second = keeper(folder)
        os.kill(second, signal.SIGKILL)
        until(lambda: not local._locked(folder / "keeper.lock"))
    with hold() as again:
        assert again == ray
        assert keeper(folder) != second


@pytest.mark.parametrize(
    "victim",
    [
        "ray start",
        pytest.param("gcs_server", marks=pytest.mark.full),
        pytest.param("raylet", marks=pytest.mark.full),
    ],
)
def test_a_dead_head_is_replaced_and_leaves_no_orphan(folder: Path, victim: str) -> None:
    said: list[str] = []
    with LocalConnection(said.append) as connection:
        before = connection.cluster()
        dead = present(folder)
        before.submit(f"sleeper of {victim}", "exec sleep 600", {}, {})
        until(lambda: (job := before.job(f"sleeper of {victim}")) is not None and job.status == "RUNNING")
        os.kill(dead.pids[victim], signal.SIGKILL)
        until(lambda: not dead.alive())  # which takes a moment on a busy machine
        after = connection.cluster()
        assert after.session_name == present(folder).session_name != dead.session_name
        assert after.job(f"sleeper of {victim}") is None
        assert said == ["the local Ray has died; starting a new one"]
        assert gone(dead)
        assert open_files_of_nobody(dead)


def test_on_loopback_alone_and_unused_it_ends_with_its_jobs_and_leaves_nothing(folder: Path) -> None:
    with hold() as ray:
        head, its_keeper = present(folder), keeper(folder)
        ray.cluster().submit("endless", "exec sleep 600", {}, {})
        until(lambda: (job := ray.cluster().job("endless")) is not None and job.status == "RUNNING")

        def sleeping() -> list[psutil.Process]:
            lines = asked(processes_of(head), psutil.Process.cmdline)
            return [process for process, line in lines if line == ["sleep", "600"]]

        until(sleeping)  # RUNNING is said a moment before the shell has become the command
        sleepers = sleeping()
        assert len(processes_of(head)) > 10
        listening = [
            at.laddr
            for _, found in asked(processes_of(head), lambda process: process.net_connections("inet"))
            for at in found
            if at.status == psutil.CONN_LISTEN
        ]
        assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
        # Ray's usual ones
        assert not {address.port for address in listening} & {6379, 8265, 8266, 10001, 52365}
    released = time.monotonic()
    until(lambda: not psutil.pid_exists(its_keeper), seconds=IDLE_SECONDS + 20.0)
    assert time.monotonic() - released > IDLE_SECONDS
    assert gone(head)
    assert open_files_of_nobody(head)
    assert not any(process.is_running() for process in sleepers)
    assert read_head(folder) is None


@pytest.mark.full
def test_a_ray_whose_folder_was_removed_ends(folder: Path) -> None:
    with hold():
        head = present(folder)
        shutil.rmtree(folder)
        until(lambda: gone(head))
        assert open_files_of_nobody(head)


@pytest.mark.full
def test_a_failed_start_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shut_down()
    monkeypatch.setenv("RAY_object_spilling_config", "not json")
    with pytest.raises(LocalRayError, match=r"(?s)exit code 1.*JSONDecodeError.*RAY_object_spilling"), hold():
        pass
    assert read_head(folder) is None
    until(lambda: not local._locked(folder / "keeper.lock"), seconds=2.0)
    assert not [process for process in psutil.process_iter() if marked_with(folder, process)]


@pytest.mark.full
def test_a_start_that_fails_halfway_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray start` leaves its gcs_server behind when the dashboard's port is taken."""
    assert shut_down()
    records: list[Head] = []
    write, free_ports = head.write_head, head._free_ports

    def record(at: Path, head: Head) -> None:
        records.append(head)
        write(at, head)

    monkeypatch.setattr(head, "write_head", record)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(head, "_free_ports", lambda _: [taken.getsockname()[1], *free_ports(1)])
        with pytest.raises(LocalRayError, match=r"(?s)exit code 1.*already occupied"):
            head.start_head(folder)
    assert gone(records[0])
    assert open_files_of_nobody(records[0])
    assert read_head(folder) is None
