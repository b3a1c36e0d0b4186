"""Run many episodes of the simulator, or see how soon it finds each planted bug.

    python benchmarks/simulation.py episodes 20000
    python benchmarks/simulation.py bugs 2000
    python benchmarks/simulation.py orders 8
    python benchmarks/simulation.py shrink SEED
    python benchmarks/simulation.py write

Episodes go on after the last one in results/simulation.json, while the code of the engine is the same. A finding is
printed with its seed; `tests.simulation.drivers.episode(SEED)` repeats it, and `shrink` leaves out the faults that it
does not need. `write` fills in results/simulation.md.
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
from tests.simulation.bugs import BUGS, planted
from tests.simulation.drivers import Transitions, episode
from tests.simulation.orders import in_order, orders
from tests.simulation.shrinking import shrunk

RECORD = RESULTS / "simulation.json"
CODE = ("pipelines/engine", "pipelines/store", "pipelines/environment.py", "ray_jobs/process", "tests/simulation")
CODE += tuple(f"tests/support/{name}.py" for name in ("memory_store", "network", "world"))
SAVE_SECONDS = 60.0


def code() -> str:
    """Return a digest of the code that runs in the simulator, and of the simulator."""
    files = [path for name in CODE for path in sorted([PROJECT / name, *(PROJECT / name).rglob("*.py")])]
    return sha256("".join(path.read_text() for path in files if path.is_file()))


def run_episodes(count: int) -> None:
    """Run `count` more episodes, and record what they found."""
    record = read()
    if record["code"] != code():
        record |= {"code": code(), "next": 0, "cpu_seconds": 0.0, "findings": {}, "transitions": {}}
    transitions: Transitions = Counter({tuple(key.split(" | ")): n for key, n in record["transitions"].items()})
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
            save({**read(), **record})
            saved = time.monotonic()
    rate = record["next"] / record["cpu_seconds"]
    print(f"{record['next']} episodes, {rate:.0f} per CPU second, {len(record['findings'])} findings")


def find_bugs(within: int) -> None:
    """Record the first episode that finds each planted bug, and how many episodes of the code as it is find nothing."""
    record = read()
    clean = record["next"] - len(record["findings"]) if record["code"] == code() else 0
    record["bugs"] = {}
    print(f"{clean} episodes of the code as it is found nothing", flush=True)
    for bug in BUGS:
        found = None
        with planted(bug):
            for seed in range(within):
                try:
                    episode(seed)
                except Exception as error:
                    frame = traceback.extract_tb(error.__traceback__)[-1]
                    said = str(error).split("\n")[0] or (frame.line or "")
                    found = [seed, f"{type(error).__name__}: {said}"[:90]]
                    break
        record["bugs"][bug.name] = found
        print(f"{bug.name:50} {found or f'not within {within}'}", flush=True)
    save(read() | {"bugs": record["bugs"]})


def run_orders(requests: int) -> None:
    """Run every order of the first requests of two drivers."""
    began, number = time.process_time(), 0
    for order in orders(requests):
        in_order(order)
        number += 1
    seconds = time.process_time() - began
    save(read() | {"orders": {"requests": requests, "orders": number, "cpu_seconds": seconds}})
    print(f"{number} orders of {requests} requests of each, {number / seconds:.0f} per CPU second, no findings")


def write() -> None:
    """Write results/simulation.md."""
    record = read()
    transitions = Counter(record["transitions"])
    lines = [
        "# The simulator of drivers",
        "",
        f"`python benchmarks/simulation.py episodes N`: {record['next']:,} episodes (seeds 0 to {record['next'] - 1}), "
        f"{record['cpu_seconds']:,.0f} CPU seconds, {record['next'] / max(record['cpu_seconds'], 1e-9):.0f} per CPU "
        f"second, {len(record['findings'])} findings. Digest of the code: `{record['code'][:16]}`.",
        *[f"- episode {seed}: {found}" for seed, found in record["findings"].items()],
    ]
    if found := record.get("orders"):
        lines += ["", f"`orders {found['requests']}`: two drivers of one stage, all {found['orders']:,} orders of the"]
        lines[-1] += f" first {found['requests']} requests of each from the look for its attempts on, no findings,"
        lines[-1] += f" {found['cpu_seconds']:.0f} CPU seconds."
    if bugs := record.get("bugs"):
        lines += ["", "Planted bugs (`bugs N`), and the first episode that finds each:", ""]
        lines += ["| bug | episode | what it finds |", "|---|---|---|"]
        lines += [
            f"| {name} | {found[0]} | {found[1]} |" if found else f"| {name} | - | |" for name, found in bugs.items()
        ]
    lines += ["", f"Transitions of a stage that were seen: {len(transitions)} kinds.", ""]
    lines += ["| phase | observed | actions | times |", "|---|---|---|---|"]
    lines += [f"| {key} | {n:,} |" for key, n in transitions.most_common()]
    (RESULTS / "simulation.md").write_text("\n".join(lines) + "\n")


def read() -> dict[str, Any]:
    if RECORD.exists():
        return dict(json.loads(RECORD.read_text()))
    return {"code": code(), "next": 0, "cpu_seconds": 0.0, "findings": {}, "transitions": {}}


def save(record: dict[str, Any]) -> None:
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write()
    elif sys.argv[1] == "shrink":
        print(shrunk(int(sys.argv[2])))
    else:
        {"episodes": run_episodes, "bugs": find_bugs, "orders": run_orders}[sys.argv[1]](int(sys.argv[2]))
