"""Hosts with a Ray on some of them, and outside of it a host with the store and one of a person who runs pipelines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import hosts
from tests.support.clusters import wait_for

HEAD, WORKERS, STORE, PERSON = 1, (2, 3), 4, 5
ADDRESS, S3 = "http://10.88.0.1:8265", "http://10.88.0.4:5000"
RAY = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats")
SUPERVISED = ("bash", "-c", 'until "$@"; do sleep 1; done', "supervisor")  # a node that ends begins anew


@dataclass
class HostCluster:
    """The hosts, and the environment of everything on them: the token, and keys of the store."""

    hosts: hosts.Hosts
    environment: dict[str, str]
    nodes: dict[int, subprocess.Popen[str]] = field(default_factory=dict)

    def add(self, host: int, **environment: str) -> None:
        """Start Ray on a host: the head without CPUs, the others with one."""
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
            host, *SUPERVISED, *RAY, *role, f"--node-ip-address={self.hosts.address(host)}",
            "--object-store-memory=200000000", **self.environment, **environment,
        )  # fmt: skip

    def vitflow(self, *arguments: str | Path, store: str = "s3://bucket/store") -> str:
        """Run the command line outside of the cluster."""
        return self.python(PERSON, *self.command(*arguments, store=store))

    def command(self, *arguments: str | Path, store: str) -> tuple[str | Path, ...]:
        """Return Python's arguments for a command of the command line."""
        where = () if arguments[0] in {"report", "verify"} else ("--address", ADDRESS)
        return "-m", "pipelines", *arguments, "--store", store, *where

    def start(self, host: int, log: Path, *arguments: str | Path) -> subprocess.Popen[str]:
        """Start Python on a host, with its output in a file."""
        log.touch()
        redirected = ("bash", "-c", 'exec "$@" >>"$0" 2>&1', log, sys.executable, "-u", *arguments)
        return self.hosts.start(host, *redirected, **self.environment)

    def python(self, host: int, *arguments: str | Path) -> str:
        return self.hosts.run(host, sys.executable, *arguments, **self.environment)

    def status(self, run: str) -> dict[str, Any]:
        return dict(json.loads(self.vitflow("status", run, "--json")))

    def finish(self, run: str) -> str:
        """Wait for the end of a run, and return its log."""
        wait_for(lambda: self.status(run)["status"] not in {"RUNNING", "PENDING"}, 150)
        return self.vitflow("logs", run)

    def cpus(self) -> int:
        """Of the nodes that live, as Ray sees them; 0 if it does not answer."""
        code = "import ray; ray.init(logging_level='error'); print(int(ray.cluster_resources().get('CPU', 0)))"
        at = self.environment | {"RAY_ADDRESS": f"{self.hosts.address(HEAD)}:6379"}
        try:
            return int(self.hosts.run(HEAD, sys.executable, "-W", "ignore", "-c", code, **at).split()[-1])
        except AssertionError:
            return 0

    def succeeds(self, host: int, *arguments: str) -> bool:
        """Whether Python does, with these arguments."""
        try:
            self.python(host, *arguments)
        except AssertionError:
            return False
        return True


@contextmanager
def host_cluster(**of_workers: str) -> Iterator[HostCluster]:
    """Start a head, workers and a store; `of_workers` is what the workers' environment has, too."""
    with hosts.several_hosts(PERSON) as made:
        token = made.folder / "token"
        token.touch(mode=0o600)
        token.write_text("a" * 64)
        environment = {
            "AWS_ACCESS_KEY_ID": "moto",
            "AWS_SECRET_ACCESS_KEY": "moto",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_S3": S3,
            "AWS_EC2_METADATA_DISABLED": "true",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
        }
        made.start(STORE, sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", "5000")
        cluster = HostCluster(made, environment)
        cluster.add(HEAD)
        make = "import boto3; boto3.client('s3').create_bucket(Bucket='bucket')"
        wait_for(lambda: cluster.succeeds(STORE, "-c", make), 60)
        for host in WORKERS:
            cluster.add(host, **of_workers)
        wait_for(lambda: cluster.cpus() == len(WORKERS), 120)
        yield cluster
