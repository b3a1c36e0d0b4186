"""A pretraining with two workers, compared with bare processes and other frameworks: `python benchmarks/pretrain.py`.

Every arm (`training/arms.py`) trains the same model, in bfloat16, on the same random pixels, one thread per worker, in
fresh processes. They take turns; a ratio compares figures of the same round. "Nothing exchanged" is the rate of two
processes that do the same step with clipping and AdamW, each on a batch in memory, without data loading, augmentation
and communication: no training with two workers can be faster. Then: the cost of a checkpoint, one worker and two, and
compiled blocks. Peers are installed into a separate folder in the system's temporary folder. How long a stage takes to
start is in benchmarks/pipeline_overhead.py.

    python benchmarks/pretrain.py [--rounds 5]

Prints the tables and writes them to benchmarks/results/pretrain.md; takes half an hour on two idle cores.

What was predicted, and what was measured (quickstart's model, two cores of an AMD EPYC, Linux 6.18 at 250 Hz):
- Two workers waited for 5 ms (plain) to 9 ms (ZeRO-1) of each step while no core was busy with their work. The kernel's
  trace of switches shows gloo: its thread for sockets preempts the thread that holds a connection's lock, and asks for
  the lock until its time slice ends, 3 ms. `devices.let_gloo_yield` makes it a batch thread, which does not preempt. An
  all-reduce of 1 MB took 1.0 ms instead of 3.4 (medians), a step 36.6 instead of 40.4 (plain), 43.1 instead of 48.1
  (ZeRO-1).
- Binding each worker to its own core: ZeRO-1 40.7 ms, plain the same. Not done, because Ray does not tell a job which
  cores are free.
- Instead, time slices of 0.1 ms for gloo's threads, or a lower priority of the main threads: less than half the gain.
- DeepSpeed without `contiguous_gradients`: 3 ms less, the same bits.
- Workers waited for one more reduction to know whether a checkpoint is due; now rank 0's answer has a step's time to
  arrive.
- torch's optimizers import torch._dynamo when they are made, 2.9 s in every worker. Without it, the first step of a
  plain training starts 12.1 instead of 15.4 s after submission (Intel Xeon with AMX). DeepSpeed imports it anyway.
- Importing torch in Ray tasks while Ray Train's controller starts, so that its workers reuse these processes: Ray does
  not reuse them.
- 1.3 times Hugging Face's `Trainer` and DDP with a DataLoader is out of reach at this size: the same step without any
  exchange and without data is only 1.2 to 1.5 times as fast, because the model is the same.
"""

from __future__ import annotations

import argparse
import importlib
import os
import socket
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch.multiprocessing
from common import ROOT, install, keep, setting, spread
from training.arms import ARMS, PEERS, REQUIREMENTS, run
from training.sizes import SIZES, Size, write_noise

BARE, PLAIN, ZERO = "two processes, nothing exchanged", "ours, plain", "ours, ZeRO-1"
SAVED = "ours, plain, often saved"
ALONE = ("one process", "one process, compiled blocks", "ours, plain, one worker")
LARGE = (BARE, PLAIN, ZERO, SAVED)
TARGETS = {("quickstart", PLAIN): 0.85, ("quickstart", ZERO): 0.75}
Rates = dict[str, list[float]]


def main() -> None:
    """Measure everything and keep the tables."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    arguments.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    arguments.add_argument("--no-keep", dest="is_kept", action="store_false", help="print the tables only")
    options = arguments.parse_args()
    if not PEERS.exists():
        install(PEERS, *REQUIREMENTS.split(), check=False)
        importlib.invalidate_caches()
    load, lines = os.getloadavg()[0], []
    with tempfile.TemporaryDirectory(prefix="vfb-") as name:
        folder = Path(name)
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT)])
        for size in options.sizes:
            arms = [arm for arm in options.arms if size == "quickstart" or arm in LARGE]
            rates = take_turns(SIZES[size], arms, options.rounds, folder / size.replace("/", ""))
            lines += table(size, rates)
            lines += ["| measured | value | target |", "|---|---:|---|"]
            lines += scaling(rates) if size == "quickstart" else []
            lines += stalls(SIZES[size], rates)
    head = [
        "# Steps of a pretraining with two workers",
        "",
        f"`python benchmarks/pretrain.py {' '.join(sys.argv[1:])}`".replace(" `", "`") + f", {setting(load)}, "
        f"torch {torch.__version__}; bfloat16, one thread per worker; medians (ranges) over {options.rounds} "
        "interleaved rounds, each in fresh processes.",
        "",
    ]
    keep("pretrain.md", [*head, *lines[:-1]], is_written=options.is_kept)


def take_turns(size: Size, arms: list[str], rounds: int, folder: Path) -> Rates:
    """Return the images per second of each arm in each round; the order of the arms alternates."""
    write_noise(folder, size)
    rates: Rates = defaultdict(list)
    for number in range(rounds):
        for arm in arms if number % 2 == 0 else reversed(arms):
            rates[arm].append(rate(arm, size, folder))
            print(f"round {number + 1}: {arm}: {rates[arm][-1]:,.1f} images/s", file=sys.stderr, flush=True)
    return {arm: rates[arm] for arm in arms}


def rate(arm: str, size: Size, folder: Path) -> float:
    """Run an arm in fresh processes."""
    world = 1 if arm in ALONE or arm.startswith("Ray Train") else 2  # Ray starts its own workers
    with tempfile.TemporaryDirectory() as scratch, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        torch.multiprocessing.spawn(run, (world, arm, size, folder, Path(scratch), port), nprocs=world)
        times = [float(line) for line in (Path(scratch) / "times").read_text().split()][size.warm :]
    return size.batch * (len(times) - 1) / (times[-1] - times[0])


def table(name: str, rates: Rates) -> list[str]:
    """Return a size's table."""
    lines = [f"## {name}, {SIZES[name].batch} images per step", ""]
    lines += ["| two workers | images/s | relative to nothing exchanged | target | speedup of ours, plain |"]
    lines += ["|---|---:|---:|---|---:|"]
    for arm, own in rates.items():
        if arm in ALONE or arm == SAVED:
            continue
        target = f">= {TARGETS.get((name, arm), 0.95):.2f}" if arm in (PLAIN, ZERO) else ""
        faster = "" if arm in (BARE, PLAIN, ZERO) else ratio(rates[PLAIN], own)
        lines.append(f"| {arm} | {spread(own)} | {ratio(own, rates[BARE])} | {target} | {faster} |")
    return [*lines, ""]


def scaling(rates: Rates) -> list[str]:
    """Return rows that compare two workers with one, and compiled blocks with eager ones."""
    alone, compiled, one = (
        rates[arm] for arm in ("one process", "one process, compiled blocks", "ours, plain, one worker")
    )
    return [
        f"| two workers over one, plain | {ratio(rates[PLAIN], one)} | |",
        f"| two bare processes over one | {ratio(rates[BARE], alone)} | |",
        f"| compiled blocks over eager, one bare process | {ratio(compiled, alone)} | |",
    ]


def stalls(size: Size, rates: Rates) -> list[str]:
    """Return rows with the cost of a checkpoint."""
    timed = range(size.warm + 1, size.steps)  # the clock starts when the first of them ends
    images = len(timed) * size.batch
    count = sum(step % size.saved_every == 0 for step in timed)
    seconds = [
        images * (1 / saved - 1 / unsaved) / count for saved, unsaved in zip(rates[SAVED], rates[PLAIN], strict=True)
    ]
    return [
        f"| seconds per checkpoint | {spread(seconds, 3)} | |",
        f"| its share of 5 minutes | {statistics.median(seconds) / 300:.2%} | <= 2% |",
        "",
    ]


def ratio(these: list[float], those: list[float]) -> str:
    """Return median and range of the rounds' ratios."""
    return spread([this / that for this, that in zip(these, those, strict=True)], 2)


if __name__ == "__main__":
    main()
