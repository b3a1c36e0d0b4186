"""A cluster on several hosts whose names do not resolve, the store on another host; hosts are cut off and killed."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support import hosts
from tests.support.clusters import wait_for
from tests.support.paths import TINY

HEAD, WORKERS, OUTSIDE = 1, (2, 3), 4  # the store and the person who submits are outside the cluster
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.skipif("VITFLOW_HOSTS" not in os.environ, reason="six minutes; `make test-hosts`"),
    pytest.mark.skipif(hosts.missing() is not None, reason=hosts.missing() or ""),
]
RAY = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats")
SUPERVISED = ("bash", "-c", 'until "$@"; do sleep 1; done', "supervisor")  # a node that ends begins anew


@dataclass
class Clustered:
    """Hosts with a Ray on some of them."""

    hosts: hosts.Hosts
    environment: dict[str, str]  # of everything: the token, and keys of the store
    nodes: dict[int, subprocess.Popen[str]] = field(default_factory=dict)

    def add(self, host: int, **environment: str) -> None:
        """Start Ray on a host: the head without CPUs, the others with one."""
        address = self.hosts.address(host)
        role = [
            "--head",
            "--port=6379",
            "--num-cpus=0",
            "--dashboard-host=0.0.0.0",
            "--include-dashboard=true",
        ]
        if host != HEAD:
            role = [f"--address={self.hosts.address(HEAD)}:6379", "--num-cpus=1"]
        self.nodes[host] = self.hosts.start(
            host, *SUPERVISED, *RAY, *role, f"--node-ip-address={address}", "--object-store-memory=200000000",
            **self.environment, **environment,
        )  # fmt: skip

    def vitflow(self, *arguments: str | Path) -> str:
        """Run the command line outside of the cluster."""
        at = ("--store", "s3://bucket/store", "--address", f"http://{self.hosts.address(HEAD)}:8265")
        where = at[:2] if arguments[0] in {"report", "verify"} else at
        command = (sys.executable, "-m", "pipelines", *arguments, *where)
        return self.hosts.run(OUTSIDE, *command, **self.environment)

    def status(self, run: str) -> dict[str, Any]:
        return dict(json.loads(self.vitflow("status", run, "--json")))

    def finish(self, run: str) -> str:
        """Wait for the end of a run, and return its log."""
        wait_for(lambda: self.status(run)["status"] not in {"RUNNING", "PENDING"}, 150)
        return self.vitflow("logs", run)

    def cpus(self) -> int:
        """Of the nodes that live, as Ray sees them."""
        code = "import ray; ray.init(logging_level='error'); print(int(ray.cluster_resources().get('CPU', 0)))"
        at = self.environment | {"RAY_ADDRESS": f"{self.hosts.address(HEAD)}:6379"}
        return int(self.hosts.run(HEAD, sys.executable, "-W", "ignore", "-c", code, **at).split()[-1])


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Clustered]:
    """The parameter is what the environment of the nodes has, too."""
    with hosts.several_hosts(OUTSIDE) as made:
        token = made.folder / "token"
        token.touch(mode=0o600)
        token.write_text("a" * 64)
        keys = {"AWS_ACCESS_KEY_ID": "moto", "AWS_SECRET_ACCESS_KEY": "moto", "AWS_REGION": "us-east-1"}
        environment = keys | {
            "AWS_ENDPOINT_URL_S3": f"http://{made.address(OUTSIDE)}:5000",
            "AWS_EC2_METADATA_DISABLED": "true",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
        }
        made.start(OUTSIDE, sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", "5000")
        started = Clustered(made, environment)
        started.add(HEAD)
        make = "import boto3; boto3.client('s3').create_bucket(Bucket='bucket')"
        wait_for(lambda: succeeds(started, OUTSIDE, "-c", make), 30)
        for host in WORKERS:
            started.add(host, **getattr(request, "param", {}))
        wait_for(lambda: cpus(started) == len(WORKERS), 60)
        yield started


def succeeds(cluster: Clustered, host: int, *arguments: str) -> bool:
    try:
        cluster.hosts.run(host, sys.executable, *arguments, **cluster.environment)
    except AssertionError:
        return False
    return True


def cpus(cluster: Clustered) -> int:
    try:
        return cluster.cpus()
    except AssertionError:
        return 0


def test_workers_on_two_hosts_train_and_what_follows_is_made(cluster: Clustered) -> None:
    run = cluster.vitflow("submit", TINY, "--set", "pretrain.workers=2").split()[1]
    log = cluster.finish(run)
    assert cluster.status(run)["status"] == "SUCCEEDED", log
    assert re.search(r"workers on 2 hosts connect over 10\.88\.0\.[23] \(eth0\), 10\.88\.0\.[23] \(eth0\)", log)
    assert "workers died" not in log


def test_a_host_that_is_cut_off_for_a_minute_and_another_that_is_killed(cluster: Clustered) -> None:
    """Training goes on on the hosts that are left, in one attempt."""
    long = ("--set", "pretrain.steps=100000", "--set", "pretrain.checkpoint_every.steps=200")
    run = cluster.vitflow("submit", TINY, "--set", "pretrain.workers=2", *long, "--only", "pretrain").split()[1]
    wait_for(lambda: step(cluster, run) > 200, 120)
    cluster.hosts.cut(WORKERS[1])
    time.sleep(60)
    cluster.hosts.heal(WORKERS[1])
    before = step(cluster, run)
    wait_for(lambda: step(cluster, run) > before and cpus(cluster) == len(WORKERS), 120)
    cluster.hosts.kill(WORKERS[0])
    before = step(cluster, run)
    wait_for(lambda: step(cluster, run) > before + 200, 120)
    cluster.vitflow("stop", run)
    log = cluster.vitflow("logs", run)
    assert "--- pretrain (attempt 1" in log and "workers died; continuing from step" in log, log
    cluster.hosts.heal(WORKERS[0])


def step(cluster: Clustered, run: str) -> int:
    """The last step of a pretraining that its log has."""
    [pretrain] = [stage for stage in cluster.status(run)["stages"] if stage["stage"] == "pretrain"]
    return int((pretrain.get("progress") or {}).get("step") or 0)


@pytest.mark.parametrize("cluster", [{"GLOO_SOCKET_IFNAME": "lo"}], indirect=True)
def test_workers_that_cannot_connect_say_so_once(cluster: Clustered) -> None:
    """A user's own interface wins; here it is one over which they cannot reach each other."""
    only = ("--set", "pretrain.workers=2", "--set", "pretrain.seed=1", "--only", "pretrain")
    run = cluster.vitflow("submit", TINY, *only).split()[1]
    log = cluster.finish(run)
    [pretrain] = [stage for stage in cluster.status(run)["stages"] if stage["stage"] == "pretrain"]
    assert pretrain["status"] == "FAILED" and pretrain["attempt"] == 1
    assert "the workers cannot connect: rank" in pretrain["detail"] and "GLOO_SOCKET_IFNAME" in pretrain["detail"]
    assert "GLOO_SOCKET_IFNAME=lo" in log and "Traceback" not in log and "workers died" not in log
