"""The cost of commands on large stores: `python benchmarks/catalog.py [ceph]`.

Copies the artifacts and the run of a finished quickstart under new keys and ids, without their files, into folders or
into a bucket of a Ceph on this machine. Runs each command three times as a whole process and prints the CPU seconds and
the memory; those of folders are written to benchmarks/results/. The first `list` of each kind builds the catalog;
`warm` is the last time. On Ceph, each artifact and run also has what a LIST must skip: an attempt, an event.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from itertools import islice
from pathlib import Path

from common import keep, setting
from report_query import MEANS, commit_evaluation

from pipelines.store import Store, open_store
from tests.support.documented import prepare
from tests.support.s3 import running_ceph

RUNS, ON_CEPH, QUERIED = (1_000, 10_000), 5_000, 2_000  # runs in folders and on Ceph; files for report query
WRITERS = 16  # threads
COMMANDS = (
    "list",
    "list --kind models",
    "list --kind evaluations",
    "report list",
    "plan quickstart",
    "report query 'SELECT job, count(*) FROM artifacts GROUP BY job'",
)


def main() -> None:
    """Make the stores, run the commands, keep the table."""
    load, on_ceph = os.getloadavg()[0], sys.argv[1:] == ["ceph"]
    with tempfile.TemporaryDirectory(prefix="vfb-") as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        prepare(folder)
        lines = [*(_on_ceph(folder) if on_ceph else _in_folders(folder))]
    head = [
        f"# Commands on large stores {'on Ceph' if on_ceph else 'in a folder'}",
        "",
        f"`python benchmarks/catalog.py{' ceph' if on_ceph else ''}`, {setting(load)}. Target at 100,000 artifacts: "
        "< 2 s and < 150 MB, warm.",
        "",
        "| artifacts | runs | command | CPU, first | CPU, warm | wall, warm | memory, warm |",
        "|---:|---:|---|---:|---:|---:|---:|",
    ]
    keep("catalog.md", [*head, *lines], is_written=not on_ceph)


def _in_folders(prepared: Path) -> Iterator[str]:
    for number in RUNS:
        store = prepared / str(number)
        for name, data in multiplied(prepared / "runs", number):
            (store / name).parent.mkdir(parents=True, exist_ok=True)
            (store / name).write_bytes(data)
        yield from measured(str(store), number)


def _on_ceph(prepared: Path) -> Iterator[str]:
    with running_ceph() as server, ThreadPoolExecutor(WRITERS) as threads:
        os.environ.update(server.environment)
        bucket, began = server.bucket(), time.monotonic()
        objects = multiplied(prepared / "runs", ON_CEPH, with_folders=True)
        while some := [*islice(objects, 1_000)]:
            [*threads.map(lambda each: bucket.write(*each), some)]
        print(f"written in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        yield from measured(f"s3://{bucket.name}", ON_CEPH)
        queried = f"s3://{server.bucket().name}"
        store = open_store(queried)
        [*threads.map(lambda number: commit_evaluation(store, number), range(QUERIED))]
        for sql in (MEANS, "SELECT count(*) FROM rows"):
            yield line(f"report query '{sql}'", queried, QUERIED, 0)
        yield from _listing(open_store(f"s3://{bucket.name}"))


def _listing(store: Store) -> Iterator[str]:
    """Yield what one LIST of a thousand names costs this process."""
    cpu, wall = time.process_time(), time.monotonic()
    names = store.versions("artifacts/finetune", ["manifest.json"], "attempts")
    lists = 2 * len(names) / 1_000
    each = (1e3 * (end - start) / lists for start, end in ((cpu, time.process_time()), (wall, time.monotonic())))
    yield "\n{:,.0f} LISTs of a thousand names: {:.0f} ms of CPU time and {:.0f} ms each.\n".format(lists, *each)


def multiplied(original: Path, number: int, with_folders: bool = False) -> Iterator[tuple[str, bytes]]:
    """Yield the objects of a store with this many copies of a run and its artifacts, one run an hour."""
    yield "store.json", (original / "store.json").read_text().replace('"id": "', f'"id": "{number}').encode()
    (run,) = (path.name for path in (original / "runs").iterdir())
    records = {
        str(path.relative_to(original)): path.read_text()
        for path in (*original.glob("artifacts/*/*/manifest.json"), *original.glob("runs/*/*.json"))
    }
    keys = [name.split("/")[2] for name in records if name.startswith("artifacts/")]
    if with_folders:
        manifests = [name for name in records if name.endswith("/manifest.json")]
        records |= {name.replace("manifest.json", "attempts/1/attempt.json"): "{}" for name in manifests}
        records[f"runs/{run}/events/0.json"] = "{}"
    for age in range(number):
        started = datetime.now(UTC) - timedelta(hours=age + 1)
        new = {run: f"quickstart-{started:%Y%m%d-%H%M%S}-{age % 2**16:04x}"}
        new |= {key: sha256(f"{age} {key}".encode()).hexdigest() for key in keys}
        for name, text in records.items():
            for old, other in new.items():
                name, text = name.replace(old, other), text.replace(old, other)
            yield name, sealed(text).encode()


def sealed(text: str) -> str:
    """Return a manifest's text with the sha256 of what it is without it."""
    before, name, after = text.partition('"own_sha256":"')
    before, name, after = text.partition('"own_sha256": "') if not name else (before, name, after)
    if not name:
        return text
    rest = after[after.index('"') :]
    return before + name + sha256((before + name + rest).encode()).hexdigest() + rest


def measured(store: str, runs: int) -> Iterator[str]:
    """Yield a line of the table per command."""
    for command in COMMANDS:
        yield line(command, store, 11 * runs, runs)


def line(command: str, store: str, artifacts: int, runs: int) -> str:
    """Return the line of the table for a command."""
    times = [timed(f"{command} --store {store}") for _ in range(3)]
    first, (cpu, wall, size) = times[0], times[-1]
    cells = f"`vitflow {command}` | {first[0]:.2f} s | {cpu:.2f} s | {wall:.2f} s | {size:.0f} MB"
    shown = f"| {artifacts:,} | {runs:,} | {cells} |"
    print(shown, file=sys.stderr, flush=True)
    return shown


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
        [sys.executable, "-c", code, vitflow, *shlex.split(command)], capture_output=True, text=True, check=True
    )
    cpu, wall, size = map(float, done.stdout.split())
    return cpu, wall, size


if __name__ == "__main__":
    main()
