"""What is measured of a loader, in a fresh process: images per second, processor time, memory, the first batch."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from loading.arms import BATCH, Arm

WARM = 20_000  # images before the clock starts, or a whole epoch if that is less


def measure(arm: Arm, folder: Path, workers: int, seconds: float, images: int) -> dict[str, float]:
    """Measure an arm on a set of `images` images, for `seconds` seconds after its warm-up."""
    torch.set_num_threads(1)
    for module in arm.imports:
        importlib.import_module(module)
    started = time.perf_counter()
    batches = arm.batches(folder, workers)
    next(batches)
    first = time.perf_counter() - started
    done, peak = BATCH, memory()
    while done < min(images, WARM):
        done += len(next(batches)[0])
    began, cpu, count = time.perf_counter(), cpu_seconds(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        count += len(next(batches)[0])
    return {
        "rate": count / elapsed,
        "cpu": (cpu_seconds() - cpu) / count * 1000,
        "memory": max(peak, memory()) / 2**20,
        "first": first,
    }


def processes() -> Iterator[psutil.Process]:
    """This one and all below it."""
    yield (own := psutil.Process())
    yield from own.children(recursive=True)


def cpu_seconds() -> float:
    """Processor time of all processes, including those that ended."""
    total = 0.0
    for process in processes():
        with suppress(psutil.Error):  # it has just ended
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def memory() -> int:
    """Bytes of all processes; what they share counts once."""
    total = 0
    for process in processes():
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total
