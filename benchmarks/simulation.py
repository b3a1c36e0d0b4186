"""Run many episodes of the simulator, or see how soon it finds each planted bug.

    python benchmarks/simulation.py episodes 20000
    python benchmarks/simulation.py schedules 20000
    python benchmarks/simulation.py bugs 2000
    python benchmarks/simulation.py schedule-bugs 2000

Episodes go on after the last one in results/simulation.json, or simulation_schedules.json, while the code of the engine
is the same. A finding is printed with its seed; `tests.simulation.drivers.episode(SEED)`, or that of `schedules`,
repeats it.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from common import RESULTS

from pipelines.identity import sha256
from pipelines.identity.code import PROJECT
from tests.simulation import drivers, schedules
from tests.simulation.bugs import BUGS, Bug, planted
from tests.simulation.drivers import Transitions
from tests.simulation.schedule_bugs import BUGS as SCHEDULE_BUGS

CODE = ("pipelines/engine", "pipelines/schedules", "pipelines/store", "pipelines/environment.py")
CODE += ("ray_jobs/process", "tests/simulation")
SAVE_SECONDS = 60.0


def code() -> str:
    """Return a digest of the code that runs in the simulator, and of the simulator."""
    files = [path for name in CODE for path in sorted([PROJECT / name, *(PROJECT / name).rglob("*.py")])]
    return sha256("".join(path.read_text() for path in files if path.is_file()))


def run_episodes(episode: Callable[[int, Transitions], object], name: str, count: int) -> None:
    """Run `count` more episodes, and record what they found."""
    path = RESULTS / f"{name}.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if record.get("code") != code():
        record = {"code": code(), "next": 0, "cpu_seconds": 0.0, "findings": {}, "transitions": {}}
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
            path.write_text(json.dumps(record, indent=1) + "\n")
            saved = time.monotonic()
    rate = record["next"] / record["cpu_seconds"]
    print(f"{record['next']} episodes, {rate:.0f} per CPU second, {len(record['findings'])} findings")


def find_bugs(episode: Callable[[int], object], bugs: Iterable[Bug], within: int) -> None:
    """Print the first episode that finds each planted bug."""
    for bug in bugs:
        found = None
        with planted(bug):
            for seed in range(within):
                try:
                    episode(seed)
                except Exception as error:
                    found = f"episode {seed}: {type(error).__name__} {str(error)[:60]}"
                    break
        print(f"{bug.name:75} {found or f'not within {within}'}", flush=True)


if __name__ == "__main__":
    commands = {
        "episodes": partial(run_episodes, drivers.episode, "simulation"),
        "schedules": partial(run_episodes, schedules.episode, "simulation_schedules"),
        "bugs": partial(find_bugs, drivers.episode, BUGS),
        "schedule-bugs": partial(find_bugs, schedules.episode, SCHEDULE_BUGS),
    }
    commands[sys.argv[1]](int(sys.argv[2]))
