"""The Jobs client, against a real Ray: once is once, states and exit codes are seen, logs come whole and once."""

from __future__ import annotations

import ast
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from werkzeug import Response

from pipelines.cluster.jobs_client import Cluster, ClusterUnreachable, JobState, connect, python_entrypoint
from pipelines.cluster.local import hold
from tests.support.clusters import wait_for
from tests.support.serving import serving
from vit_model.errors import UserError


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with hold() as ray:
        yield ray.cluster()


def python(code: str) -> str:
    return f"exec {sys.executable} -c '{code}'"


def end_of(cluster: Cluster, submission_id: str, seconds: float = 60.0) -> JobState:
    wait_for(lambda: (job := cluster.job(submission_id)) is not None and job.ended, seconds)
    job = cluster.job(submission_id)
    assert job is not None
    return job


@pytest.mark.ray
def test_a_job_submitted_twice_runs_once(cluster: Cluster, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    code = f'import os; open("{ran}", "a").write(os.environ["WORD"])'
    for _ in range(2):
        cluster.submit("twice", python(code), {"WORD": "once "}, {"stage": "a"})
    job = end_of(cluster, "twice")
    assert (job.status, job.driver_exit_code) == ("SUCCEEDED", 0)
    cluster.submit("twice", python(code), {"WORD": "again "}, {})
    time.sleep(0.5)
    assert ran.read_text() == "once "
    assert [job.submission_id for job in cluster.jobs()].count("twice") == 1


@pytest.mark.ray
def test_a_job_runs_in_a_ray_of_its_session_and_with_the_project_importable(cluster: Cluster) -> None:
    code = (
        "import ray, pipelines.spec; ray.init(); assert ray.get(ray.remote(lambda: 7).remote()) == 7; "
        "print(ray.get_runtime_context().get_session_name())"
    )
    cluster.submit("inside", python(code), {}, {})
    assert end_of(cluster, "inside").status == "SUCCEEDED", cluster.logs("inside")
    assert cluster.session_name in cluster.logs("inside")


@pytest.mark.ray
def test_exit_code_2_is_told_from_others(cluster: Cluster) -> None:
    cluster.submit("mistake", python("import sys; print(11); sys.exit(2)"), {}, {})
    job = end_of(cluster, "mistake")
    assert (job.status, job.driver_exit_code) == ("FAILED", 2)
    assert "11" in job.message


@pytest.mark.ray
def test_a_stopped_job_is_stopped_and_an_unknown_one_unknown(cluster: Cluster) -> None:
    cluster.submit("long", python("import time; time.sleep(300)"), {}, {})
    while (job := cluster.job("long")) is not None and job.status == "PENDING":
        time.sleep(0.05)
    cluster.stop("long")
    assert end_of(cluster, "long", 10.0).status == "STOPPED"
    assert cluster.job("nobody") is None
    assert cluster.logs("nobody") == ""
    cluster.stop("nobody")
    cluster.stop("long")


@pytest.mark.ray
def test_lines_are_followed_as_they_come_each_once(cluster: Cluster, tmp_path: Path) -> None:
    """The job goes on only after its first line was seen, so that line cannot have come at the end."""
    go = tmp_path / "go"
    code = (
        'import os, time; print("first\\n")\n'
        f'while not os.path.exists("{go}"): time.sleep(0.05)\n'
        "for i in range(30000): print(i)\n"
        'print("last", end="")'
    )
    cluster.submit("chatty", python(code), {}, {})
    lines: list[str] = []

    def write(line: str) -> None:
        lines.append(line)
        if line == "first":
            go.touch()

    stop = threading.Event()
    thread = threading.Thread(target=cluster.follow_logs, args=("chatty", write, stop))
    thread.start()
    assert end_of(cluster, "chatty").status == "SUCCEEDED"
    stop.set()
    thread.join(10.0)
    assert not thread.is_alive()
    assert lines == cluster.logs("chatty").splitlines()
    assert lines[-30001:] == [*map(str, range(30000)), "last"]


@pytest.mark.ray
def test_following_ends_with_the_job(cluster: Cluster) -> None:
    cluster.submit("short", python("print(5)"), {}, {})
    lines: list[str] = []
    cluster.follow_logs("short", lines.append, threading.Event())
    assert lines[-1] == "5"
    assert end_of(cluster, "short", 0.5).status == "SUCCEEDED"


@pytest.mark.ray
def test_a_log_that_is_not_text_stops_nobody(cluster: Cluster) -> None:
    cluster.submit("bytes", "printf '\\377\\n'; exit 3", {}, {})
    assert end_of(cluster, "bytes").status == "FAILED"
    assert "UTF-8" in cluster.logs("bytes")


@pytest.mark.ray
def test_without_the_token_nobody_is_let_in(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)  # set by a Ray that this process has joined
    wrong = tmp_path / "wrong"
    wrong.write_text("0" * 64)
    with pytest.raises(ValueError, match="without a token"):
        connect(cluster.address).jobs()
    with pytest.raises(ValueError, match="refuses this token"):
        connect(cluster.address, wrong).submit("thief", "exec true", {}, {})
    assert cluster.job("thief") is None
    assert cluster.token is not None
    assert cluster.token not in repr(cluster)


def test_a_closed_port_on_loopback_is_told_from_a_server_that_is_silent() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ClusterUnreachable) as refused:  # bound, but nobody listens
            connect(address).job("a")
        assert refused.value.refused_on_loopback
        server.listen()
        threading.Thread(target=_hang_up, args=(server,)).start()
        with pytest.raises(ClusterUnreachable) as silent:
            connect(address).job("a")
        assert not silent.value.refused_on_loopback


def _hang_up(server: socket.socket) -> None:
    server.accept()[0].close()


def test_a_missing_token_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=str(tmp_path / "none")):
        connect("http://127.0.0.1:1")


def test_no_word_of_an_entrypoint_is_a_shell_command(tmp_path: Path) -> None:
    """Names of recipes, stages and stores are words of it."""
    names = [
        f"{before}touch {tmp_path}/ran{after}" for before, after in ((";", ""), ("$(", ")"), ("`", "`"), ("'\n", ""))
    ]
    code = "import sys; print(sys.argv[1:])"
    said = subprocess.run(
        ["sh", "-c", python_entrypoint("-c", code, *names)], capture_output=True, text=True, check=True
    )
    assert ast.literal_eval(said.stdout) == names
    assert not list(tmp_path.iterdir())


def test_importing_brings_in_no_ray() -> None:
    code = "import sys, pipelines.cluster.jobs_client, pipelines.cluster.local; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "ray" not in done.stdout.split()


def test_https_to_a_port_that_speaks_http_is_one_message() -> None:
    said = pytest.raises(ClusterUnreachable, match=r"no TLS connection.*use http://")
    with serving(Response()) as address, said as told:
        connect(address.replace("http:", "https:")).session_name  # noqa: B018 (asks)
    assert not told.value.refused_on_loopback


def test_another_server_in_rays_place_is_the_users_mistake() -> None:
    with serving(Response("{ a page of something else }")) as address:
        other = connect(address)
        for ask in (other.about, other.jobs, lambda: other.job("a"), lambda: other.logs("a")):
            with pytest.raises(UserError, match="answers 200, but not like Ray's dashboard"):
                ask()
