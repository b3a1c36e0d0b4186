"""Measure the cost of a model on this machine: images per second and memory of its forward pass.

In: a function that builds a model, or one that runs a pass. Out: a `Cost`. Use: `measure(prepare, device)`.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from ray_jobs.evaluation.cost import Cost, Speed
from ray_jobs.process import devices
from ray_jobs.process.stage import processor
from vit_model import compute
from vit_model.build import Network
from vit_model.contract import ModelContract
from vit_model.preprocessing import normalise

IMAGES = {"cpu": 32, "cuda": 256}  # in a measured forward pass
PASSES, SECONDS = 5, 10.0  # the maximum of timed passes; no pass begins after this time
_CLEAR_PEAK = "5"  # proc(5), clear_refs


class Measured(NamedTuple):
    """The seconds of the fastest pass, and the peak memory, see `Speed`."""

    seconds: float
    peak_bytes: int | None


def measure(prepare: Callable[[], Callable[[], None]], on: torch.device) -> Measured:
    """Time the pass on a device that `prepare` returns after it has built the model.

    The pass is prepared twice, because loading libraries takes time and memory in the first preparation. The first pass
    is not timed. The fastest of the others counts, because other work on the machine can only slow a pass down.
    """
    prepare()()
    gc.collect(1)  # young objects only; a full collection takes longer than a small model's pass
    before = _forget_peak(on)
    run = prepare()
    seconds: list[float] = []
    for number in range(1 + PASSES):
        began = time.perf_counter()
        run()
        if on.type == "cuda":
            torch.cuda.synchronize(on)
        if number:
            seconds.append(time.perf_counter() - began)
        if sum(seconds) > SECONDS:
            break
    return Measured(min(seconds), None if before is None else max(0, _peak(on) - before))


def forward_cost(build: Callable[[], Network], contract: ModelContract, dtype: torch.dtype, threads: int) -> Cost:
    """Return the cost of a model in a dtype, measured by its forward pass on this process's device."""
    devices.set_threads(threads)
    on = devices.device()
    images = random_images(contract, IMAGES[on.type], on)

    def prepare() -> Callable[[], None]:
        model = build().to(on, dtype).eval()

        def run() -> None:
            with torch.inference_mode():
                model(normalise(images, contract.preprocessing, dtype))

        return run

    architecture = contract.architecture
    return Cost(
        resolution=contract.preprocessing.resolution,
        parameters=architecture.num_parameters,
        gflops=compute.forward_flops(architecture) / 1e9,
        device=torch.cuda.get_device_name(on) if on.type == "cuda" else processor(),
        threads=threads if on.type == "cpu" else None,
        forward=speed(measure(prepare, on), len(images), dtype),
    )


def speed(measured: Measured, images: int, dtype: torch.dtype) -> Speed:
    """Return the speed of passes of `images` images."""
    return Speed(
        images=images,
        dtype=str(dtype).removeprefix("torch."),
        images_per_second=images / measured.seconds,
        peak_bytes=measured.peak_bytes,
    )


def random_images(contract: ModelContract, count: int, on: torch.device) -> torch.Tensor:
    """Return noise images for a model, uint8 [count, side, side, channels]; pixel values do not change the time."""
    pixels = contract.preprocessing
    shape = (count, pixels.resolution, pixels.resolution, pixels.channels)
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8).to(on)


def _forget_peak(on: torch.device) -> int | None:
    """Reset the peak memory and return the bytes in use; None if this system cannot reset it."""
    if on.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(on)
        return torch.cuda.memory_allocated(on)
    with suppress(AttributeError):  # other C libraries do not have it
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text(_CLEAR_PEAK)
        return resident("VmRSS")
    except OSError:
        return None


def _peak(on: torch.device) -> int:
    return torch.cuda.max_memory_allocated(on) if on.type == "cuda" else resident("VmHWM")


def resident(name: str) -> int:
    """Return this process's resident memory (VmRSS), or its peak (VmHWM), in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
