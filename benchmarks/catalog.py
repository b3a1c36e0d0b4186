"""The cost of commands on large stores: `python benchmarks/catalog.py`.

Copies the artifacts and the run of a finished quickstart under new keys and ids into folders, without their files,
runs each command three times as a whole process, and writes the CPU seconds and the memory to benchmarks/results/. The
first `list` of each kind builds the catalog; `warm` is the last time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

from common import keep, setting

from tests.support.documented import prepare

RUNS = (1_000, 10_000)
COMMANDS = ("list", "list --kind models", "list --kind evaluations", "report list", "plan quickstart")


def main() -> None:
    """Make the stores, run the commands, keep the table."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="vfb-") as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        prepare(folder)
        lines = [line for number in RUNS for line in measured(multiplied(folder, number))]
    head = [
        "# Commands on large stores in a folder",
        "",
        f"`python benchmarks/catalog.py`, {setting(load)}. Target at 100,000 artifacts: < 2 s and < 150 MB, warm.",
        "",
        "| artifacts | runs | command | CPU, first | CPU, warm | wall, warm | memory, warm |",
        "|---:|---:|---|---:|---:|---:|---:|",
    ]
    keep("catalog.md", [*head, *lines])


def multiplied(prepared: Path, number: int) -> Path:
    """Return a store with this many copies of the prepared run and its artifacts, one run an hour."""
    store, original = prepared / str(number), prepared / "runs"
    store.mkdir()
    identity = (original / "store.json").read_text().replace('"id": "', f'"id": "{number}')
    (store / "store.json").write_text(identity)
    (run,) = (path.name for path in (original / "runs").iterdir())
    records = {
        path.relative_to(original): path.read_text()
        for path in (*original.glob("artifacts/*/*/manifest.json"), *original.glob("runs/*/*.json"))
    }
    keys = [name.parts[2] for name in records if name.parts[0] == "artifacts"]
    for age in range(number):
        started = datetime.now(UTC) - timedelta(hours=age + 1)
        new = {run: f"quickstart-{started:%Y%m%d-%H%M%S}-{age % 2**16:04x}"}
        new |= {key: sha256(f"{age} {key}".encode()).hexdigest() for key in keys}
        for name, record in records.items():
            path, text = str(name), record
            for old, other in new.items():
                path, text = path.replace(old, other), text.replace(old, other)
            (store / path).parent.mkdir(parents=True, exist_ok=True)
            (store / path).write_text(sealed(text))
    return store


def sealed(text: str) -> str:
    """Return a manifest's text with the sha256 of what it is without it."""
    before, name, after = text.partition('"own_sha256":"')
    before, name, after = text.partition('"own_sha256": "') if not name else (before, name, after)
    if not name:
        return text
    rest = after[after.index('"') :]
    return before + name + sha256((before + name + rest).encode()).hexdigest() + rest


def measured(store: Path) -> Iterator[str]:
    """Yield a line of the table per command."""
    runs, artifacts = (len([*store.glob(names)]) for names in ("runs/*", "artifacts/*/*"))
    for command in COMMANDS:
        times = [timed(f"{command} --store {store}") for _ in range(3)]
        first, (cpu, wall, size) = times[0], times[-1]
        cells = f"`vitflow {command}` | {first[0]:.2f} s | {cpu:.2f} s | {wall:.2f} s | {size:.0f} MB"
        line = f"| {artifacts:,} | {runs:,} | {cells} |"
        print(line, file=sys.stderr, flush=True)
        yield line


def timed(command: str) -> tuple[float, float, float]:
    """Run a command; return its CPU and wall seconds, and its peak memory in MB."""
    code = (
        "import resource, subprocess, sys, time; start = time.monotonic();"
        "subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True); wall = time.monotonic() - start;"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN);"
        "print(used.ru_utime + used.ru_stime, wall, used.ru_maxrss / 1024)"
    )
    vitflow = str(Path(sys.executable).parent / "vitflow")
    done = subprocess.run(
        [sys.executable, "-c", code, vitflow, *command.split()], capture_output=True, text=True, check=True
    )
    cpu, wall, size = map(float, done.stdout.split())
    return cpu, wall, size


if __name__ == "__main__":
    main()
