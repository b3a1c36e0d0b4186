"""The two-core record: Fashion-MNIST, from its files to a test accuracy: `python benchmarks/speedrun/run.py ENTRY`.

    python benchmarks/speedrun/run.py vit.py --dev           # choose by this
    python benchmarks/speedrun/run.py vit.py                 # five seeds on test, kept in the table
    python benchmarks/speedrun/run.py vit.py -- --epochs 4   # with options of the entry

An entry is a program with two commands:

    ENTRY train DATA SEED MODEL [options]     reads DATA/images.npy, labels.npy; writes the file MODEL
    ENTRY predict MODEL IMAGES PREDICTIONS    reads IMAGES; writes the class of each image

Images are uint8 [n, 28, 28] and labels uint8 [n], in the files' order; predictions are integers [n].

Rules, which are on trust. The time is the wall clock of the whole process `train`: imports, reading, compiling and
teachers are in it, scoring is not. Two cores, no network, no weights or data from elsewhere. What an entry is like is
chosen on dev, the last 10,000 training images (`--dev` trains on the other 50,000); each look at test is counted in the
table. An entry trains with the seed that it is given, and its result is the mean over five seeds or more, with its 95%
interval. "Pure" ViTs have one linear projection of patches, no convolution and no teacher; others are entered as
hybrid, ResNet, distilled.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import RESULTS, keep, setting

FILES = Path("/usr/share/datasets/fashion-mnist")  # of Debian's package dataset-fashion-mnist
DEV = 10_000
SEEDS = 5
RECORD = RESULTS / "speedrun.jsonl"
Pixels = NDArray[np.uint8]


def main() -> None:
    """Run an entry, print its accuracies, and keep those on test."""
    arguments = argparse.ArgumentParser(usage="run.py ENTRY [--dev] [--seeds N] [-- OPTIONS OF THE ENTRY]")
    arguments.add_argument("entry", help="a file beside this one, or a path")
    arguments.add_argument("--dev", action="store_true", help="score dev, the last 10,000 training images")
    arguments.add_argument("--seeds", type=int, default=SEEDS)
    place = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, given_on = arguments.parse_args(sys.argv[1:place]), sys.argv[place + 1 :]
    beside = Path(__file__).parent / options.entry
    entry = beside if beside.exists() else Path(options.entry)
    images, labels = read("train")
    scored = (images[-DEV:], labels[-DEV:]) if options.dev else read("t10k")
    given = slice(0, len(images) - DEV) if options.dev else slice(None)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    for seed in range(options.seeds):
        load = os.getloadavg()[0]
        seconds, accuracy = run(entry, given_on, (images[given], labels[given]), scored, seed)
        print(f"seed {seed}: {accuracy:.2%} in {seconds / 60:.2f} minutes", flush=True)
        record = {"entry": " ".join([entry.stem, *given_on]), "about": described(entry), "seed": seed}
        record |= {"seconds": seconds, "accuracy": accuracy, "setting": setting(load)}
        if not options.dev:  # each look at test, also of a run that is then interrupted
            with RECORD.open("a") as file:
                file.write(json.dumps(record) + "\n")
    if not options.dev:
        keep("speedrun.md", page([json.loads(text) for text in RECORD.read_text().splitlines()]))


def read(part: str) -> tuple[Pixels, Pixels]:
    """Return the images and the labels of a part, from the authors' IDX files."""
    images = np.frombuffer(gzip.decompress((FILES / f"{part}-images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16)
    labels = np.frombuffer(gzip.decompress((FILES / f"{part}-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8)
    return images.reshape(-1, 28, 28), labels


def run(
    entry: Path,
    options: list[str],
    given: tuple[Pixels, Pixels],
    scored: tuple[Pixels, Pixels],
    seed: int,
) -> tuple[float, float]:
    """Train an entry in a process of its own, which is given nothing else; return its seconds and its accuracy."""
    with tempfile.TemporaryDirectory(prefix="vfb-") as name:
        folder = Path(name)
        (folder / "data").mkdir()
        for file, array in zip(("images", "labels"), given, strict=True):
            np.save(folder / "data" / f"{file}.npy", array)
        began = time.monotonic()
        call(entry, "train", folder / "data", seed, folder / "model", *options)
        seconds = time.monotonic() - began
        np.save(folder / "test.npy", scored[0])
        call(entry, "predict", folder / "model", folder / "test.npy", folder / "predictions.npy")
        return seconds, float((np.load(folder / "predictions.npy") == scored[1]).mean())


def call(entry: Path, *words: Any) -> None:
    subprocess.run([sys.executable, str(entry), *map(str, words)], check=True)


def described(entry: Path) -> str:
    """Return the first line of an entry's docstring, which says what it is."""
    return entry.read_text().partition('"""')[2].partition("\n")[0].removesuffix('"""')


def page(records: list[dict[str, Any]]) -> list[str]:
    """Return the table, the best first: the last record of each entry and seed."""
    entries: dict[str, dict[int, dict[str, Any]]] = {}
    for record in records:
        entries.setdefault(record["entry"], {})[record["seed"]] = record
    looks = Counter(record["entry"].split()[0] for record in records)
    ordered = sorted(entries.values(), key=lambda seeds: -statistics.mean(each["accuracy"] for each in seeds.values()))
    return [
        "# The two-core record: Fashion-MNIST",
        "",
        "Test accuracy in percent, with its 95% interval over seeds, and median minutes from the start of the "
        "process to the last weight. `python benchmarks/speedrun/run.py ENTRY` runs an entry; the head of run.py has"
        " the rules. `looks`: how often this program has been scored on test, with any options and seeds. Compare "
        "minutes of one day: an epoch of the ResNet took 31 s on 2026-11-28 and 18 s on 2026-11-29, on a machine of "
        "the same name.",
        "",
        "| entry | what it is | median minutes | accuracy | seeds | looks |",
        "|---|---|---:|---:|---:|---:|",
        *(line([*seeds.values()], looks) for seeds in ordered),
        "",
        *(f"- {record['entry']}: {record['setting']}" for seeds in ordered for record in [*seeds.values()][-1:]),
    ]


def line(records: list[dict[str, Any]], looks: Counter[str]) -> str:
    """Return an entry's line of the table; with fewer than five seeds, it has no interval."""
    accuracies = [record["accuracy"] for record in records]
    mean, count = 100 * statistics.mean(accuracies), len(accuracies)
    shown = f"{mean:.2f}"
    if count >= SEEDS:
        shown += f" ± {100 * t.ppf(0.975, count - 1) * statistics.stdev(accuracies) / count**0.5:.2f}"
    minutes, entry = statistics.median(record["seconds"] for record in records) / 60, records[0]["entry"]
    return f"| {entry} | {records[0]['about']} | {minutes:.1f} | {shown} | {count} | {looks[entry.split()[0]]} |"


if __name__ == "__main__":
    main()
