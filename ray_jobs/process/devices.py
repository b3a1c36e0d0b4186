"""The hardware of a worker, detected at run time: its device and threads."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

from vit_model.errors import UserError


def device(local_rank: int = 0) -> torch.device:
    """Return the device of this process; each worker on a machine gets its own GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


# FLOPs per second of dense matrix products, by words of the GPU's name: (bfloat16, float32 without TF32). From NVIDIA's
# data sheets, whose bfloat16 figures are twice as high, for sparse matrices. The first match counts.
_PEAKS = {
    "B200": (2250e12, 80e12),
    "H200 NVL": (835.5e12, 60e12),
    "H200": (989.5e12, 67e12),
    "H100 NVL": (835.5e12, 60e12),
    "H100 PCIe": (756e12, 51e12),
    "H100": (989.5e12, 67e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
    "A10": (125e12, 31.2e12),
}


def peak_flops(on: torch.device, dtype: torch.dtype) -> float | None:
    """Return a device's peak FLOPs per second in a dtype; None if it is not known.

    It is not known for CPUs, because it depends on their clock, nor for parts of a GPU (MIG).
    """
    if on.type != "cuda" or torch.backends.cuda.matmul.allow_tf32:
        return None
    return known_peak(torch.cuda.get_device_name(on), is_float32=dtype == torch.float32)


def known_peak(name: str, is_float32: bool) -> float | None:
    """Return the peak FLOPs per second of the GPU with this name; None if it is not known."""
    if re.search(r"\bMIG\b", name):
        return None
    return next((peaks[is_float32] for word, peaks in _PEAKS.items() if re.search(rf"\b{word}\b", name)), None)


def backend() -> str:
    """Return the communication backend for this kind of device: NCCL for GPUs, else gloo."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def let_gloo_yield() -> None:
    """Keep the gloo threads of this process that serve sockets from preempting its other threads. Only on Linux.

    Such a thread polls its socket in a loop while another thread holds the socket's lock. If it was woken on that
    thread's core, it polls until its time slice ends: most collectives of processes that use all cores wait 3 ms
    (benchmarks/pretrain.py). A thread for batch work never preempts. Call this when all groups exist.
    """
    if sys.platform != "linux":
        return
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended, or this container forbids it
            if (thread / "comm").read_text().startswith("gloo_tcp_loop"):
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))


def set_threads(threads: int) -> None:
    """Set the number of CPU threads of torch's operators. Results are reproducible for the same number only."""
    torch.set_num_threads(threads)


def torch_dtype(name: str, on: torch.device) -> torch.dtype:
    """Return the dtype of matrix products, after checking that the device supports it.

    Raises:
        UserError: the GPU does not support bfloat16.
    """
    if name == "bfloat16" and on.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(f"dtype: {torch.cuda.get_device_name(on)} does not support bfloat16; use dtype: float32")
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def import_deepspeed() -> Any:
    """Import deepspeed, set up for the CPU if there is no GPU: it chooses its accelerator during the import."""
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    import deepspeed

    # Its engines import the Muon optimizer, which we do not use. Decorating it with torch.compile takes 2 s.
    compiler = deepspeed.runtime.compiler
    compiler.compile = lambda: compiler.dummy_decorator
    return deepspeed
