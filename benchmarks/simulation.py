"""Run many episodes of the simulator, or see how soon it finds each planted bug.

    python benchmarks/simulation.py drivers episodes 200000
    python benchmarks/simulation.py drivers bugs 2000
    python benchmarks/simulation.py schedules episodes 20000
    python benchmarks/simulation.py schedules bugs 2000
    python benchmarks/simulation.py drivers orders 8
    python benchmarks/simulation.py drivers shrink SEED
    python benchmarks/simulation.py write

Episodes go on after the last one of the record, results/simulation_KIND.json, while the code is the same. A finding is
printed with its seed; `tests.simulation.drivers.episode(SEED)`, or that of `schedules`, repeats it, and `shrink` leaves
out the faults that it does not need. `write` fills in results/simulation.md.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections import Counter
from typing import Any

from common import RESULTS

from pipelines.identity import sha256
from pipelines.identity.code import PROJECT
from tests.simulation import bugs, drivers, schedule_bugs, schedules
from tests.simulation.orders import in_order, orders
from tests.simulation.shrinking import shrunk

KINDS: dict[str, Any] = {"drivers": (drivers.episode, bugs.BUGS), "schedules": (schedules.episode, schedule_bugs.BUGS)}
CODE = ("pipelines/engine", "pipelines/schedules", "pipelines/store", "pipelines/environment.py")
CODE += ("ray_jobs/process", "tests/simulation")
CODE += tuple(f"tests/support/{name}.py" for name in ("memory_store", "network", "world"))
SAVE_SECONDS = 60.0


def code() -> str:
    """Return a digest of the code that runs in the simulator, and of the simulator."""
    files = [path for name in CODE for path in sorted([PROJECT / name, *(PROJECT / name).rglob("*.py")])]
    return sha256("".join(path.read_text() for path in files if path.is_file()))


def run_episodes(kind: str, count: int) -> None:
    """Run `count` more episodes, and record what they found."""
    episode, _ = KINDS[kind]
    record = read(kind)
    if record["code"] != code():
        record |= {"code": code(), "next": 0, "cpu_seconds": 0.0, "findings": {}, "transitions": {}}
    transitions = Counter({tuple(key.split(" | ")): n for key, n in record["transitions"].items()})
    began, last, saved = time.process_time(), record["next"] + count, time.monotonic()
    before = record["cpu_seconds"]
    for seed in range(record["next"], last):
        try:
            episode(seed, transitions)
        except Exception as error:
            traceback.print_exc(limit=-2)
            record["findings"][str(seed)] = f"{type(error).__name__}: {error}"
        record["next"], record["cpu_seconds"] = seed + 1, before + time.process_time() - began
        if seed + 1 == last or time.monotonic() - saved > SAVE_SECONDS:
            record["transitions"] = {" | ".join(key): n for key, n in sorted(transitions.items())}
            save(kind, read(kind) | record)
            saved = time.monotonic()
    rate = record["next"] / record["cpu_seconds"]
    print(f"{record['next']} episodes, {rate:.0f} per CPU second, {len(record['findings'])} findings")


def find_bugs(kind: str, within: int) -> None:
    """Record the first episode that finds each planted bug."""
    episode, planted_bugs = KINDS[kind]
    found: dict[str, Any] = {}
    for bug in planted_bugs:
        found[bug.name] = None
        with bugs.planted(bug):
            for seed in range(within):
                try:
                    episode(seed)
                except Exception as error:
                    frame = traceback.extract_tb(error.__traceback__)[-1]
                    said = str(error).split("\n")[0] or (frame.line or "")
                    found[bug.name] = [seed, f"{type(error).__name__}: {said}"[:90]]
                    break
        print(f"{bug.name:75} {found[bug.name] or f'not within {within}'}", flush=True)
    save(kind, read(kind) | {"bugs": found})


def run_orders(kind: str, requests: int) -> None:
    """Run every order of the first requests of two drivers."""
    began, number = time.process_time(), 0
    for order in orders(requests):
        in_order(order)
        number += 1
    seconds = time.process_time() - began
    save(kind, read(kind) | {"orders": {"requests": requests, "orders": number, "cpu_seconds": seconds}})
    print(f"{number} orders of {requests} requests of each, {number / seconds:.0f} per CPU second, no findings")


def write() -> None:
    """Write results/simulation.md."""
    lines = ["# The simulator", ""]
    for kind in KINDS:
        lines += [f"## Episodes of {kind}", "", *_section(kind, read(kind)), ""]
    (RESULTS / "simulation.md").write_text("\n".join(lines[:-1]) + "\n")


def _section(kind: str, record: dict[str, Any]) -> list[str]:
    number, seconds = record["next"], record["cpu_seconds"]
    lines = [
        f"`python benchmarks/simulation.py {kind} episodes N`: {number:,} episodes (seeds 0 to {number - 1}), "
        f"{seconds:,.0f} CPU seconds, {number / max(seconds, 1e-9):.0f} per CPU second, {len(record['findings'])} "
        f"findings. Digest of the code: `{record['code'][:16]}`.",
        *[f"- episode {seed}: {found}" for seed, found in record["findings"].items()],
    ]
    if found := record.get("orders"):
        lines += [
            "",
            f"`{kind} orders {found['requests']}`: two drivers of one stage, all {found['orders']:,} orders of the "
            f"first {found['requests']} requests of each from the look for its attempts on, no findings, "
            f"{found['cpu_seconds']:.0f} CPU seconds.",
        ]
    if planted_bugs := record.get("bugs"):
        lines += ["", f"Planted bugs (`{kind} bugs N`), and the first episode that finds each:", ""]
        lines += ["| bug | episode | what it finds |", "|---|---|---|"]
        lines += [
            f"| {name} | {found[0]} | {found[1]} |" if found else f"| {name} | - | |"
            for name, found in planted_bugs.items()
        ]
    return [*lines, "", f"What was seen and done: {len(record['transitions'])} kinds, in simulation_{kind}.json."]


def read(kind: str) -> dict[str, Any]:
    path = RESULTS / f"simulation_{kind}.json"
    if path.exists():
        return dict(json.loads(path.read_text()))
    return {"code": code(), "next": 0, "cpu_seconds": 0.0, "findings": {}, "transitions": {}}


def save(kind: str, record: dict[str, Any]) -> None:
    (RESULTS / f"simulation_{kind}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write"]:
            write()
        case ["drivers", "shrink", seed]:
            print(shrunk(int(seed)))
        case ["drivers", "orders", requests]:
            run_orders("drivers", int(requests))
        case [("drivers" | "schedules") as kind, "episodes", number]:
            run_episodes(kind, int(number))
        case [("drivers" | "schedules") as kind, "bugs", number]:
            find_bugs(kind, int(number))
        case _:
            sys.exit(__doc__)
