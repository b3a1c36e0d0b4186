"""A sweep of one-worker trials, compared with the bare trainings: `python benchmarks/sweep.py`.

The quickstart's model is trained from scratch on scikit-learn's digits, in float32, one thread per trial, two trials at
once. The bare training is plain torch: the same model, batches in memory, AdamW, clipping, a cosine, and accuracy on
dev at the end, timed without its imports. A sweep is a `vitflow run` of a fine-tuning whose learning rates are the
trials. Its time runs from the stage's submission to a running Ray until the last trial is in the ledger, and includes
the start of the job, Ray Tune, the trials' processes, the loader, the log and the checkpoints.

- The overhead of a further trial: sweeps of 2 and of 10 trials of a few steps. The difference of their times, times two
  cores, divided by eight trials, minus the bare training.
- Eight trials of a minute, compared with half the sum of the bare trainings, each alone on the machine.

Prints the table and writes it to benchmarks/results/sweep.md; takes 25 minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from common import QUICKSTART, ROOT, keep, keep_ray_below, setting, spread
from torch.nn import functional

from pipelines.cluster.local import hold, shut_down
from ray_jobs.data.shards import open_dataset
from vit_model.config import ViTConfig
from vit_model.contract import Preprocessing
from vit_model.model import ViT
from vit_model.preprocessing import normalise

CORES, TRIALS, SECONDS = 2, 8, 60.0
FEW, SHORT_STEPS = 2, 20
BATCH = 256
PIXELS = Preprocessing(resolution=8, channels=1, mean=(0.5,), std=(0.5,))
RECIPE = """
name: sweep
description: A sweep over learning rates.
stages:
  digits: {{job: ingest, source: {{kind: digits}}}}
  finetune:
    job: finetune
    data: digits
    model: {{patch_size: 2, width: 64, depth: 4, num_heads: 4, gelu: exact}}
    resolution: 8
    learning_rates: {rates}
    steps: {steps}
    batch_size: {batch}
    dtype: float32
    seed: {seed}
"""


class Bare(NamedTuple):
    """The seconds of a bare training, and its accuracy on dev."""

    seconds: float
    accuracy: float


def main() -> None:
    """Measure, print the table and keep it."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--seconds", type=float, default=SECONDS, help="of a long trial")
    arguments.add_argument("--no-keep", dest="is_kept", action="store_false", help="print the table only")
    options = arguments.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="vfb-") as name:
        folder = Path(name)
        keep_ray_below(folder, idle_seconds=600)
        os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        try:
            with hold():
                lines = measure(folder, options.rounds, options.seconds)
        finally:
            shut_down()
    head = [
        "# A sweep, compared with the bare trainings",
        "",
        f"`python benchmarks/sweep.py`, {setting(load)}, torch {torch.__version__}; medians (ranges) over"
        f" {options.rounds} interleaved rounds.",
        "",
    ]
    keep("sweep.md", [*head, *lines], is_written=options.is_kept)


def measure(folder: Path, rounds: int, seconds: float) -> list[str]:
    """Return the table's lines."""
    run_sweep(folder, FEW, SHORT_STEPS, seed=0)  # warms up, and ingests
    (dataset,) = (folder / "store").glob("artifacts/ingest/*/attempts/*/files/dataset.json")
    steps = round(seconds / bare(dataset.parent, 200)[0].seconds * 200)
    alone, together, short, further, whole, overheads = [], [], [], [], [], []
    accuracies: list[float] = []
    for number in range(1, rounds + 1):
        long = bare(dataset.parent, steps)[0]
        pair = bare(dataset.parent, steps, CORES)
        brief = bare(dataset.parent, SHORT_STEPS)[0].seconds
        few = run_sweep(folder, FEW, SHORT_STEPS, number)
        many = run_sweep(folder, FEW + TRIALS, SHORT_STEPS, number)
        alone.append(long.seconds)
        together.append(max(each.seconds for each in pair))
        short.append(brief)
        further.append((many - few) * CORES / TRIALS - brief)
        whole.append(run_sweep(folder, TRIALS, steps, number))
        overheads.append(whole[-1] / (alone[-1] * TRIALS / CORES))
        accuracies.append(long.accuracy)
    fastest = [each / (pair * TRIALS / CORES) for each, pair in zip(whole, together, strict=True)]
    return [
        f"A bare training of {steps:,} steps reaches an accuracy on dev of {statistics.median(accuracies):.3f}; a short"
        f" one has {SHORT_STEPS} steps.",
        "",
        "| measured | value | target |",
        "|---|---:|---|",
        f"| a short bare training | {spread(short, 2)} s | |",
        f"| overhead of a further short trial | {spread(further, 2)} s | <= 3 s |",
        f"| a long bare training, alone | {spread(alone, 2)} s | |",
        f"| the same, two at once | {spread(together, 2)} s | |",
        f"| a sweep of {TRIALS} long trials | {spread(whole, 2)} s | |",
        f"| the sweep / (sum of the bare ones alone / {CORES}) | {spread(overheads, 2)} | <= 1.3 |",
        f"| the sweep / (sum of the bare ones two at once / {CORES}) | {spread(fastest, 2)} | |",
    ]


# ------------------------------------------------------------------------------------------------- the contenders


def run_sweep(folder: Path, trials: int, steps: int, seed: int) -> float:
    """Run a fine-tuning with this many learning rates; return the seconds from its submission to its last trial."""
    store = folder / "store"
    rates = np.geomspace(1e-4, 1e-2, trials).round(6).tolist()
    recipe = folder / "sweep.yaml"
    recipe.write_text(RECIPE.format(rates=rates, steps=steps, batch=BATCH, seed=seed))
    pattern = "artifacts/finetune/*/attempts/1/attempt.json"
    before = set(store.glob(pattern))
    command = [sys.executable, "-m", "pipelines", "run", str(recipe), "--store", str(store)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as run:
        while True:
            ended = time.time()  # before the look, because the ledger is removed when the stage is finished
            for attempt in set(store.glob(pattern)) - before:
                if len(list(attempt.parent.glob("ledger/trial-*.json"))) == trials:
                    began = attempt.stat().st_mtime
                    if run.wait():
                        sys.exit("the run failed")
                    return ended - began
            if run.poll() is not None:
                sys.exit(f"the run ended before {trials} trials were in its ledger")
            time.sleep(0.05)


def bare(dataset: Path, steps: int, at_once: int = 1) -> list[Bare]:
    """Train in fresh processes at the same time."""
    with ProcessPoolExecutor(at_once, mp_context=get_context("spawn")) as processes:
        return list(processes.map(train, [dataset] * at_once, [steps] * at_once))


def train(dataset: Path, steps: int) -> Bare:
    """Train as a fine-tuning from scratch does, without anything around it."""
    torch.set_num_threads(1)
    data = open_dataset(dataset)
    arrays = {}
    for split in ("train", "dev"):
        arrays[split] = (
            normalise(torch.from_numpy(data.images(split, PIXELS)), PIXELS, torch.float32),
            torch.tensor(data.labels(split)),
        )
    fit(arrays, 2)  # warms up: the first optimizer imports torch._dynamo
    began = time.perf_counter()
    accuracy = fit(arrays, steps)
    return Bare(time.perf_counter() - began, accuracy)


def fit(arrays: dict[str, tuple[torch.Tensor, torch.Tensor]], steps: int) -> float:
    """Train and return the accuracy on dev."""
    model = ViT(ViTConfig(**QUICKSTART, mlp_dim=256, num_classes=10, gelu="exact"))
    model.initialise(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.1 * steps), (1 + math.cos(math.pi * step / steps)) / 2)
    )
    images, labels = arrays["train"]
    order = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = torch.randint(len(labels), (BATCH,), generator=order)
        loss = functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.inference_mode():
        images, labels = arrays["dev"]
        return (model.eval()(images).argmax(dim=1) == labels).double().mean().item()


if __name__ == "__main__":
    main()
