"""Training batches of our loader and of seven peers, from the same images: `python benchmarks/loader.py`.

There are three sets (`loading/data.py`). From JPEGs, each loader makes uint8 batches of 256 random crops, resized to
224 and flipped; raw images stay whole. Each measurement is a fresh process, on one core and then on two, with the best
of 1, 2 and 3 workers or threads. Rounds are interleaved; the table has medians and ranges. The floor is simplejpeg's
decoding and torch's resizing of such crops alone, in the same number of threads. Each loader's correctness is tested,
too (each image once, damage noticed). Peers are installed into a separate folder in the system's temporary folder.

    python benchmarks/loader.py [--images 8192] [--rounds 5] [--seconds 6]

Prints the tables and writes them to benchmarks/results/loader.md. In full it takes hours on an otherwise idle machine.
To try it quickly:

    python benchmarks/loader.py --images 512 --rounds 1 --seconds 1 --cores 2 --sets originals --no-keep
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from common import ROOT, install, keep, setting
from loading import data, table
from loading.arms import ARMS, BATCH, PEERS, REQUIREMENTS
from loading.decoding import SIDE

WORKERS = (1, 2, 3)


def main() -> None:
    """Measure everything and keep the tables."""
    options = arguments()
    if not PEERS.exists():
        install(PEERS, *REQUIREMENTS.split(), check=False)  # the tables say which are left out
        importlib.invalidate_caches()
    load, lines = os.getloadavg()[0], []
    for name in options.sets:
        folder, images = data.prepare(name, options.images)
        arms = [arm for arm in options.arms if ARMS[arm].reads_raw or not data.is_raw(folder)]
        for cores in options.cores:
            run = partial(in_process, cores, "rate", folder=folder, images=images, seconds=options.seconds)
            lines += shown(table.rates(name, cores, take_turns(run, arms, options.rounds)))
        if name == "originals":
            data.write_damaged(folder)
            run = partial(in_process, 2, "gates", folder=folder, images=images)
            lines += shown(table.correctness({arm: run(arm=arm) for arm in arms if arm != "floor"}))
    head = [
        "# Training batches, compared with other loaders",
        "",
        f"`python benchmarks/loader.py {' '.join(sys.argv[1:])}`, {options.images:,} JPEGs, {setting(load)}.",
        f"A random crop of each image resized to {SIDE} and flipped, uint8 batches of {BATCH}; medians over "
        f"{options.rounds} interleaved rounds, each in a fresh process, with the best of {WORKERS} workers or threads.",
        "",
    ]
    keep("loader.md", [*head, *lines[:-1]], is_written=options.is_kept)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=8192, help="JPEGs in a set")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6, help="of each measurement, after its warm-up")
    parser.add_argument("--cores", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--sets", nargs="*", default=list(data.SETS), choices=list(data.SETS))
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--no-keep", dest="is_kept", action="store_false", help="print the tables only")
    return parser.parse_args()


def in_process(cores: int, what: str, *, folder: Path, **given: Any) -> dict[str, Any]:
    """Measure or test an arm in a fresh process on `cores` cores; if it fails, return its error."""
    allowed = ",".join(map(str, sorted(os.sched_getaffinity(0))[:cores]))
    request = json.dumps({"what": what, "folder": str(folder), **given})
    command = ["taskset", "-c", allowed, sys.executable, "-m", "loading", request]
    path = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT)])
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
        "PYTHONPATH": path,
    }
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return {"error": "took more than ten minutes"}
    except (IndexError, ValueError):
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:120]}


def take_turns(run: Any, arms: list[str], rounds: int) -> dict[str, table.Measured]:
    """Measure the arms in turn, `rounds` times, each with the number of workers that was fastest in its trial."""
    measured = {}
    for arm in arms:
        tried = {workers: run(arm=arm, workers=workers) for workers in WORKERS}
        fit = {workers: each["rate"] for workers, each in tried.items() if "rate" in each}
        error = next((each["error"] for each in tried.values() if "error" in each), "")
        measured[arm] = table.Measured(max(fit, key=fit.__getitem__) if fit else 0, [], error)
    for _ in range(rounds):
        for arm, own in measured.items():
            if own.workers and "rate" in (found := run(arm=arm, workers=own.workers)):
                own.rounds.append(found)
    return measured


def shown(lines: list[str]) -> list[str]:
    """Print a finished table, long before the page is complete."""
    print(*lines, sep="\n", file=sys.stderr, flush=True)
    return lines


if __name__ == "__main__":
    main()
