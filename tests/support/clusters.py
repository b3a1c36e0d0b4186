"""A Ray cluster started by hand with a token: its head, further nodes, and the homes of people elsewhere."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.paths import ROOT
from tests.support.s3 import free_port

# a node of a cluster knows nothing of the machine of whoever submits
FOREIGN = ("RAY_", "VITFLOW_", "XDG_CACHE_HOME", "AWS_")


@dataclass
class RayCluster:
    """A head and further nodes on this machine, each with folders and ports of its own."""

    folder: Path
    environments: Sequence[Mapping[str, str]] = ()
    """what the processes of each node have, too"""
    address: str = ""
    gcs: str = ""
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def token(self) -> Path:
        return self.folder / "token"

    def environment(self, number: int) -> dict[str, str]:
        """Of a node's processes: each has a home of its own."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        return own | {
            "HOME": str(self.folder / f"home-{number}"),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": str(ROOT),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            **(self.environments[number] if number < len(self.environments) else {}),
        }

    def add_node(self, *, cpus: int) -> subprocess.Popen[bytes]:
        """The first node is the head."""
        number = len(self.nodes)
        (self.folder / f"home-{number}").mkdir()
        role = [f"--address={self.gcs}"] if self.nodes else self._head_options()
        with (self.folder / f"node-{number}.log").open("wb") as log:
            node = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "ray.scripts.scripts",
                    "start",
                    *role,
                    f"--num-cpus={cpus}",
                    "--node-ip-address=127.0.0.1",
                    "--object-store-memory=200000000",
                    "--dashboard-agent-listen-port=0",
                    "--disable-usage-stats",
                    "--block",
                ],
                cwd=self.folder,
                env=self.environment(number),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.nodes.append(node)
        return node

    def _head_options(self) -> list[str]:
        port = free_port(3)  # those of Ray's workers, 10002 to 19999, are not given away
        self.address, self.gcs = f"http://127.0.0.1:{port}", f"127.0.0.1:{port + 1}"
        return [
            "--head",
            f"--port={port + 1}",
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={port}",
            f"--ray-client-server-port={port + 2}",
            f"--temp-dir={self.folder / 'r'}",
        ]


@contextmanager
def ray_cluster(cpus: Sequence[int], *environments: Mapping[str, str]) -> Iterator[RayCluster]:
    """A cluster with as many nodes as numbers of CPUs are given; nothing of it lives afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="vfc-"))
    cluster = RayCluster(folder, environments)
    cluster.token.touch(mode=0o600)
    cluster.token.write_text(secrets.token_hex(32))
    try:
        for number in cpus:
            cluster.add_node(cpus=number)
            wait_for(lambda: answers(cluster), 60)
        wait_for(lambda: total_cpus(cluster) == sum(cpus), 60)
        yield cluster
    finally:
        for node in cluster.nodes[::-1]:
            end(node)
        shutil.rmtree(folder, ignore_errors=True)


def answers(cluster: RayCluster) -> bool:
    from pipelines.cluster.jobs_client import ClusterUnreachable, connect

    try:
        return bool(connect(cluster.address, cluster.token).session_name)
    except ClusterUnreachable:
        return False


def total_cpus(cluster: RayCluster) -> int:
    """Of the nodes that live, as Ray sees them."""
    code = (
        "import ray; ray.init(logging_level='error', log_to_driver=False);"
        "print(int(ray.cluster_resources().get('CPU', 0)))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=cluster.environment(0) | {"RAY_ADDRESS": cluster.gcs},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return int(done.stdout) if done.returncode == 0 else 0


def end(node: subprocess.Popen[bytes], kind: signal.Signals = signal.SIGKILL) -> None:
    """End a node and everything that it started, as a machine that loses its power."""
    try:
        processes = [*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            process.send_signal(kind)
        except psutil.NoSuchProcess:
            continue
    node.wait(timeout=30)
    psutil.wait_procs(processes, timeout=10)


def home(folder: Path, **environment: str) -> dict[str, str]:
    """The environment of a person at another machine: a home, caches and a local Ray of her own."""
    folder.mkdir(parents=True)
    own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return own | {"HOME": str(folder), "VITFLOW_RAY_DIR": str(folder / "ray"), "COLUMNS": "160"} | environment


def wait_for(condition: Callable[[], object], seconds: float = 240) -> None:
    """Until a condition holds, or the test fails."""
    deadline = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if condition():
            return
        now = time.monotonic()
        assert now < deadline, "what the test waits for did not happen"
        # A question may be a command, which would take a core from what it waits for.
        time.sleep(max(0.05, 2 * (now - began)))
