"""A cluster on several hosts whose names do not resolve, the store on another host; hosts are cut off and killed."""

import os
import re
import sys
import time
from collections.abc import Iterator

import pytest

from tests.support import hosts
from tests.support.clusters import wait_for
from tests.support.host_cluster import WORKERS, HostCluster, host_cluster
from tests.support.paths import TINY

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.skipif("VITFLOW_HOSTS" not in os.environ, reason="six minutes; `make test-hosts`"),
    pytest.mark.skipif(hosts.missing() is not None, reason=hosts.missing() or ""),
]


ECHO = """
import socket
here = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
here.bind(("0.0.0.0", 9))
while True:
    here.sendto(*here.recvfrom(9))
"""
ASK = """
import socket, sys, time
there, answered, fastest = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0, 9.0
there.settimeout(0.7)
for number in range(40):
    asked = time.monotonic()
    there.sendto(b"%d" % number, (sys.argv[1], 9))
    try:
        while there.recv(9) != b"%d" % number:
            pass
        answered, fastest = answered + 1, min(fastest, time.monotonic() - asked)
    except TimeoutError:
        pass
print(answered, fastest)
"""


def test_a_broken_link_loses_and_delays_and_heals() -> None:
    """How many of 40 questions to another host are answered."""
    with hosts.several_hosts(2) as made:
        made.start(2, sys.executable, "-c", ECHO)

        def ask() -> tuple[float, float]:
            answered, fastest = made.run(1, sys.executable, "-c", ASK, made.address(2)).split()
            return float(answered), float(fastest)

        wait_for(lambda: ask()[0] == 40, 90)
        with made.broken(1, 2, hosts.Fault(0, 0, seconds=0.2)):
            answered, fastest = ask()
            assert answered == 40 and 0.4 <= fastest < 0.6
        for fault in (hosts.Fault(1, 0), hosts.Fault(0, 1)):
            with made.broken(1, 2, fault):
                assert ask()[0] == 0
        with made.broken(1, 2, hosts.Fault(0.5, 0)):
            assert 8 <= ask()[0] <= 32
        assert ask()[0] == 40


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[HostCluster]:
    """The parameter is what the environment of the workers has, too."""
    with host_cluster(**getattr(request, "param", {})) as started:
        yield started


def test_workers_on_two_hosts_train_and_what_follows_is_made(cluster: HostCluster) -> None:
    run = cluster.vitflow("submit", TINY, "--set", "pretrain.workers=2").split()[1]
    log = cluster.finish(run)
    assert cluster.status(run)["status"] == "SUCCEEDED", log
    assert re.search(r"workers on 2 hosts connect over 10\.88\.0\.[23] \(eth0\), 10\.88\.0\.[23] \(eth0\)", log)
    assert "workers died" not in log


def test_a_host_that_is_cut_off_for_a_minute_and_another_that_is_killed(cluster: HostCluster) -> None:
    """Training goes on on the hosts that are left, in one attempt."""
    long = ("--set", "pretrain.steps=100000", "--set", "pretrain.checkpoint_every.steps=200")
    run = cluster.vitflow("submit", TINY, "--set", "pretrain.workers=2", *long, "--only", "pretrain").split()[1]
    wait_for(lambda: step(cluster, run) > 200, 120)
    cluster.hosts.cut(WORKERS[1])
    time.sleep(60)
    cluster.hosts.heal(WORKERS[1])
    before = step(cluster, run)
    wait_for(lambda: step(cluster, run) > before and cluster.cpus() == len(WORKERS), 120)
    cluster.hosts.kill(WORKERS[0])
    before = step(cluster, run)
    wait_for(lambda: step(cluster, run) > before + 200, 120)
    cluster.vitflow("stop", run)
    log = cluster.vitflow("logs", run)
    assert "--- pretrain (attempt 1" in log and "workers died; continuing from step" in log, log
    cluster.hosts.heal(WORKERS[0])


def step(cluster: HostCluster, run: str) -> int:
    """The last step of a pretraining that its log has."""
    [pretrain] = [stage for stage in cluster.status(run)["stages"] if stage["stage"] == "pretrain"]
    return int((pretrain.get("progress") or {}).get("step") or 0)


@pytest.mark.parametrize("cluster", [{"GLOO_SOCKET_IFNAME": "lo"}], indirect=True)
def test_workers_that_cannot_connect_say_so_once(cluster: HostCluster) -> None:
    """A user's own interface wins; here it is one over which they cannot reach each other."""
    only = ("--set", "pretrain.workers=2", "--set", "pretrain.seed=1", "--only", "pretrain")
    run = cluster.vitflow("submit", TINY, *only).split()[1]
    log = cluster.finish(run)
    [pretrain] = [stage for stage in cluster.status(run)["stages"] if stage["stage"] == "pretrain"]
    assert pretrain["status"] == "FAILED" and pretrain["attempt"] == 1
    assert "the workers cannot connect: rank" in pretrain["detail"] and "GLOO_SOCKET_IFNAME" in pretrain["detail"]
    assert "GLOO_SOCKET_IFNAME=lo" in log and "Traceback" not in log and "workers died" not in log
