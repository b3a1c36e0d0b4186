"""Broken networks between real hosts: `python benchmarks/networks.py`, as root (network namespaces, TUN devices).

Each scenario is one `vitflow run` of an ingest and a pretraining with two workers on two hosts, while one link between
two hosts is broken for a while: the driver's, the head's, a worker's, the store's. It loses all packets in both
directions or in one, three in ten, or delays them by 200 ms and loses one in twenty; the other links are whole. If the
command fails, it is given once more. Then these must hold: the result has the bytes of an undisturbed run's, no command
made more attempts than allowed, and nothing runs any more that belongs to the run.

    python benchmarks/networks.py [--only TEXT] [--records FILE]

Scenarios that FILE has are not played again. Prints the table and writes it to benchmarks/results/networks.md.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import re
import time
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from common import keep, setting
from safetensors.numpy import load

from pipelines.engine.decisions import ATTEMPTS
from tests.support.host_cluster import HEAD, PERSON, STORE, WORKERS, HostCluster, host_cluster
from tests.support.hosts import Fault
from tests.support.paths import TINY
from tests.support.stores import repeated

FAULTS = {
    "cut": (Fault(1, 1), 5),
    "cut from the first to the second": (Fault(1, 0), 5),
    "cut from the second to the first": (Fault(0, 1), 5),
    "30% loss": (Fault(0.3, 0.3), 60),
    "200 ms, 5% loss": (Fault(0.05, 0.05, seconds=0.2), 60),
}
"""What happens to packets, and the seconds until the link is healed."""
HOSTS = {"driver": PERSON, "head": HEAD, "worker": WORKERS[0], "other worker": WORKERS[1], "store": STORE}
LINKS = {
    "head, store": PERSON,
    "worker, other worker": PERSON,
    "head, worker": PERSON,
    "worker, store": PERSON,
    "head with the driver, store": HEAD,
    "driver, head": PERSON,
    "driver, store": PERSON,
}
"""The two hosts, and where the driver runs."""
LONG = 300  # seconds; each link is also cut for so long
RECIPE = (
    "pretrain.workers=2",
    "pretrain.steps=600",
    "pretrain.checkpoint_every={steps: 50}",
)
LATEST = 30.0  # seconds of the pretraining after which its link breaks at the latest
END = 900.0  # seconds in which a command must end
RAYS_OWN = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::_AutoscalingCoordinatorActor")
LONGEST = 120  # characters of a line of the output on the page
LEAVE = 90.0  # seconds in which the processes of a run that is over must end
# What tells how a run took it; the rest of its output is the log of the stages.
TELLING = re.compile(r"WAITING|LOST|FAILED|STOPPED|another attempt|waiting for the|died|cannot connect|error:|warning:")
READ = """
import base64, json, sys
import boto3
s3, found = boto3.client("s3"), {}
for page in s3.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix=f"{sys.argv[1]}/artifacts/"):
    for name in (entry["Key"] for entry in page.get("Contents", ())):
        if name.endswith((".json", ".safetensors")):
            body = s3.get_object(Bucket="bucket", Key=name)["Body"].read()
            found[name.partition("/")[2]] = base64.b64encode(body).decode()
print(json.dumps(found))
"""
# The dataset is made once: a store begins as a copy of another.
COPY = """
import sys
import boto3
s3, (source, target) = boto3.client("s3"), sys.argv[1:]
for folder in ("store.json", "artifacts/ingest/"):
    for entry in s3.list_objects_v2(Bucket="bucket", Prefix=f"{source}/{folder}")["Contents"]:
        name = entry["Key"].removeprefix(source)
        s3.copy_object(Bucket="bucket", Key=target + name, CopySource={"Bucket": "bucket", "Key": entry["Key"]})
"""


@dataclass(frozen=True)
class Scenario:
    """A link, what is wrong with it, and for how long."""

    link: str
    fault: str
    seconds: int

    @property
    def name(self) -> str:
        return f"{self.link}: {self.fault}, {self.seconds} s"


@dataclass
class Outcome:
    """What became of a scenario; `faults` is what must not be."""

    scenario: str
    after: float
    """seconds of the pretraining before the link broke"""
    seconds: float = 0.0
    commands: int = 0
    attempts: int = 0
    same: str = ""
    faults: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    load: float = 0.0


class Stored(NamedTuple):
    """A store's records and weights, by name."""

    objects: dict[str, bytes]

    @property
    def manifests(self) -> dict[str, dict[str, Any]]:
        """Job -> its only manifest."""
        names = [name for name in self.objects if re.fullmatch(r"artifacts/\w+/\w+/manifest\.json", name)]
        found = {name.split("/")[1]: json.loads(self.objects[name]) for name in names}
        assert len(found) == len(names), f"a stage has several keys: {names}"
        return found

    @property
    def attempts(self) -> Counter[str]:
        """Job -> its attempts."""
        return Counter(name.split("/")[1] for name in self.objects if name.endswith("/attempt.json"))

    def weights(self) -> np.ndarray[Any, Any]:
        """The pretraining's weights."""
        manifest = self.manifests["pretrain"]
        folder = f"artifacts/pretrain/{manifest['key']}/attempts/{manifest['attempt']}/files"
        [name] = [name for name in self.objects if name.startswith(folder) and name.endswith("model.safetensors")]
        arrays = load(self.objects[name])
        return np.concatenate([arrays[name].ravel().astype(np.float64) for name in sorted(arrays)])


def main() -> None:
    """Play the scenarios that are not recorded, and write the page."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--only", default="", help="scenarios whose names have this text")
    arguments.add_argument("--records", type=Path, default=Path("networks.jsonl"))
    options = arguments.parse_args()
    load_before = os.getloadavg()[0]
    scenarios = [Scenario(link, fault, seconds) for (fault, (_, seconds)), link in product(FAULTS.items(), LINKS)]
    scenarios += [Scenario(link, "cut", LONG) for link in LINKS]
    options.records.touch()
    played = {record["scenario"]: Outcome(**record) for record in map(json.loads, options.records.open())}
    wanted = [each for each in scenarios if options.only in each.name and each.name not in played]
    if wanted:
        with host_cluster() as cluster:
            run(cluster, "undisturbed", PERSON, None)
            undisturbed = stored(cluster, "undisturbed")
            for number, scenario in enumerate(wanted):
                outcome = play(cluster, scenario, f"store-{number}", undisturbed)
                with options.records.open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
                played[scenario.name] = outcome
    keep("networks.md", page([played[each.name] for each in scenarios if each.name in played], load_before))


def play(cluster: HostCluster, scenario: Scenario, store: str, undisturbed: Stored) -> Outcome:
    """Run with a broken link, once more if that fails, and look at what is there."""
    print(scenario.name, flush=True)
    cluster.python(STORE, "-c", COPY, "undisturbed", store)
    outcome = Outcome(scenario.name, random.uniform(2.0, LATEST))
    began, status, told = time.monotonic(), 1, list[str]()
    while status and outcome.commands < 2:
        outcome.commands += 1
        status, output = run(
            cluster, store, LINKS[scenario.link], None if outcome.commands > 1 else (scenario, outcome)
        )
        told += [line for line in output.splitlines() if TELLING.search(line)]
    outcome.seconds, outcome.told = time.monotonic() - began, tuple(told)
    outcome.load = os.getloadavg()[0]
    left = remaining(cluster)
    found = stored(cluster, store)
    outcome.attempts = found.attempts["pretrain"]
    faults = [f"still running: {each}" for each in left]
    faults += [f"status {status}: {output[-2000:]}"] if status else []
    faults += [f"{job}: {n} attempts" for job, n in found.attempts.items() if n > ATTEMPTS * outcome.commands]
    if not status:
        outcome.same, different = compare(undisturbed, found)
        faults += different
    outcome.faults = tuple(faults)
    print(outcome, flush=True)
    return outcome


def run(cluster: HostCluster, store: str, host: int, disturbed: tuple[Scenario, Outcome] | None) -> tuple[int, str]:
    """Run the pipeline from a host; return the command's status and its output."""
    log = cluster.hosts.home(host) / f"{store}-{time.monotonic()}.txt"
    settings = [word for field in RECIPE for word in ("--set", field)]
    command = cluster.command("run", TINY, "-v", "--only", "pretrain", *settings, store=f"s3://bucket/{store}")
    process = cluster.start(host, log, *command)
    if disturbed is not None:
        scenario, outcome = disturbed
        while "pretrain  RUNNING" not in log.read_text() and process.poll() is None:
            time.sleep(0.1)
        time.sleep(outcome.after)
        one, other = (HOSTS[host.removesuffix(" with the driver")] for host in scenario.link.split(", "))
        with cluster.hosts.broken(one, other, FAULTS[scenario.fault][0]):
            time.sleep(scenario.seconds)
    return process.wait(END), log.read_text()


def stored(cluster: HostCluster, store: str) -> Stored:
    """Read a store on its own host."""
    objects = json.loads(cluster.python(STORE, "-c", READ, store))
    return Stored({name: base64.b64decode(data) for name, data in objects.items()})


def compare(undisturbed: Stored, found: Stored) -> tuple[str, list[str]]:
    """Return how the results compare, and what is wrong with that."""
    expected, manifests = undisturbed.manifests, found.manifests
    if expected.keys() != manifests.keys():
        return "", [f"made: {sorted(manifests)}"]
    if all(repeated(manifests[job]["files"]) == repeated(expected[job]["files"]) for job in expected):
        return "the same bytes", []
    difference = np.abs(undisturbed.weights() - found.weights()).max()
    return f"weights within {difference:.1e}", ["other weights"] if difference > 1e-3 else []


def remaining(cluster: HostCluster) -> list[str]:
    """Return the processes of stages and workers that still run when they should have ended."""
    deadline = time.monotonic() + LEAVE
    while (left := busy(cluster)) and time.monotonic() < deadline:
        time.sleep(2)
    return left


def busy(cluster: HostCluster) -> list[str]:
    """Return the commands of the processes on the cluster that belong to a job."""
    found = []
    for host in (HEAD, *WORKERS):
        for pid in cluster.hosts.pids(host):
            try:
                command = " ".join(psutil.Process(pid).cmdline())
            except psutil.NoSuchProcess:
                continue
            if "ray_jobs." in command or (command.startswith("ray::") and not command.startswith(RAYS_OWN)):
                found.append(f"host {host}: {command[:200]}")
    return found


def page(outcomes: list[Outcome], load_before: float) -> list[str]:
    """Return the page of results."""
    lines = [
        "# Broken networks between real hosts",
        "",
        f"`python benchmarks/networks.py`, {setting(load_before)}.",
        "",
        "Five hosts, each a network namespace of this machine: a head without CPUs, two workers with one CPU each, the "
        "store (moto), and the person with the driver. `tests/tiny.yaml --only pretrain`, 600 steps of two workers. "
        "`broke after`: how long the pretraining had been RUNNING. `load`: when the run had ended. `results`: compared "
        "with an undisturbed run; processes left running, attempts beyond the limit and failed commands would be here.",
        "",
        "| link: fault, until healed | broke after | commands | attempts | took | load | results | the driver said |",
        "|---|---:|---:|---:|---:|---:|---|---|",
    ]
    for each in outcomes:
        told = "; ".join(dict.fromkeys(" ".join(line.split())[:LONGEST] for line in each.told)).replace("|", "/")
        results = each.same + "".join(f"; {fault}" for fault in each.faults)
        lines.append(
            f"| {each.scenario} | {each.after:.0f} s | {each.commands} | {each.attempts} | {each.seconds:.0f} s "
            f"| {each.load:.0f} | {results} | {told} |"
        )
    return lines


if __name__ == "__main__":
    main()
