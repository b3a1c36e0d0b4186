"""Checks of this machine: cores, memory, shared memory, disks, GPUs, DeepSpeed's compiled op.

Out: `Finding`s, each from the machine's actual state.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from pipelines.cluster.head import LocalRayError, make_temp_folder

GIB = 2**30
MEMORY_NEEDED, MEMORY_WANTED = 2 * GIB, 4 * GIB  # the local Ray alone takes 0.9 GiB, a worker with torch 0.5
DISK_NEEDED, DISK_WANTED = 1 * GIB, 10 * GIB
RAY_STOPS_AT = 0.95  # of a disk: Ray does not spill objects onto a fuller one
RAY_OBJECT_STORE = 0.3  # of memory, by default
GPU_SECONDS = 60.0


@dataclass(frozen=True)
class Finding:
    """A check: its subject (`what`), its status, the result (`text`), and what to do (`do`, empty if it is ok)."""

    what: str
    status: Literal["ok", "warning", "problem"]
    text: str
    do: str = ""


def machine_findings(places: dict[str, Path]) -> Iterator[Finding]:
    """Check this machine. `places`: name of the data written -> its folder."""
    gpus = _gpus()
    yield _accelerator(gpus)
    yield _communication_op(bool(gpus))
    yield _cores()
    yield _memory()
    yield _shared_memory()
    yield from _disks(places | {"temporary files": Path(tempfile.gettempdir())})
    yield _socket_path()


def _cores() -> Finding:
    count, allowed = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    limit, _ = cgroup_limits()
    usable = min(count, allowed, limit or count)
    if usable < count:
        return Finding(
            "cores",
            "warning",
            f"this machine has {count}, of which a container or a CPU affinity allows {usable:g}",
            "Ray and torch may use all of them and slow each other down: run with `--parallel 1` and "
            f"OMP_NUM_THREADS={max(1, int(usable))}, or raise the limit",
        )
    return Finding("cores", "ok", f"{count}")


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    _, limit = cgroup_limits()
    total = min(memory.total, limit or memory.total)
    free = min(memory.available, total)
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free"
    text += f" (the machine has {memory.total / GIB:.1f}, a container's limit is lower)" * (total < memory.total)
    if free >= MEMORY_WANTED:
        return Finding("memory", "ok", text)
    return Finding(
        "memory",
        "problem" if free < MEMORY_NEEDED else "warning",
        text,
        f"Ray and one worker need at least {MEMORY_NEEDED / GIB:.0f} GiB: end other programs or use a larger machine; "
        "`--parallel 1` and `workers: 1` need the least",
    )


def _shared_memory() -> Finding:
    path = Path("/dev/shm")  # noqa: S108 (Ray's choice)
    if not path.is_dir():
        remedy = "mount it; without it Ray keeps objects on disk"
        return Finding("shared memory", "warning", f"there is no {path}", remedy)
    size = shutil.disk_usage(path).total
    wanted = int(RAY_OBJECT_STORE * min(psutil.virtual_memory().total, cgroup_limits()[1] or sys.maxsize))
    text = f"{path} has {size / GIB:.2f} GiB"
    if size >= wanted:
        return Finding("shared memory", "ok", text)
    return Finding(
        "shared memory",
        "warning",
        f"{text}, but Ray's object store needs {wanted / GIB:.1f}: it uses the disk instead, which is slow",
        f"give the container more: `docker run --shm-size={-(-wanted // GIB)}g`; in Kubernetes, an emptyDir with "
        "`medium: Memory` at /dev/shm",
    )


def _disks(places: dict[str, Path]) -> Iterator[Finding]:
    """Yield one finding per disk."""
    disks: dict[int, tuple[Path, list[str]]] = {}
    for name, path in places.items():
        folder = nearest_folder(path)
        disks.setdefault(folder.stat().st_dev, (folder, []))[1].append(name)
    for path, names in disks.values():
        usage = shutil.disk_usage(path)
        what = f"disk of {path}"
        text = f"{usage.free / GIB:.1f} of {usage.total / GIB:.0f} GiB are free, for {', '.join(names)}"
        full = usage.used / max(1, usage.used + usage.free)
        text += f" ({full:.0%} full: Ray spills nothing above {RAY_STOPS_AT:.0%})" * (full > RAY_STOPS_AT)
        if usage.free >= DISK_WANTED and full <= RAY_STOPS_AT:
            yield Finding(what, "ok", text)
        else:
            yield Finding(what, "problem" if usage.free < DISK_NEEDED else "warning", text, _MAKE_SPACE)


_MAKE_SPACE = "free space, or use another disk: `--store` for results, TMPDIR for temporary files, XDG_CACHE_HOME"


def nearest_folder(path: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    path = path.expanduser().absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _socket_path() -> Finding:
    try:
        folder = make_temp_folder()
    except LocalRayError as error:
        return Finding("Ray's folder", "problem", str(error), "set it: TMPDIR=/tmp vitflow ...")
    folder.rmdir()
    return Finding("Ray's folder", "ok", f"{folder.parent} is writable, and short enough for Ray's sockets")


# ------------------------------------------------------------------------------------------------- torch, DeepSpeed


def _gpus() -> list[str]:
    """Return the names of the GPUs that the driver lists."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GPU_SECONDS)
    except subprocess.TimeoutExpired:
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def _accelerator(gpus: list[str]) -> Finding:
    if not gpus:
        return Finding("GPU", "ok", "none found; the CPU is used")
    text = f"{len(gpus)}: {', '.join(dict.fromkeys(gpus))}"
    count = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    try:
        done = subprocess.run(count, capture_output=True, text=True, timeout=GPU_SECONDS)
        seen = int(done.stdout) if done.stdout.strip().isdigit() else 0
    except subprocess.TimeoutExpired:
        seen = 0
    if seen:
        return Finding("GPU", "ok", f"{text}; torch sees {seen}")
    problem = "torch is the CPU build" if _torch_cuda() is None else "torch cannot use them"
    return Finding(
        "GPU",
        "problem",
        f"{text}, but {problem}",
        "rm -rf .venv && make install DEVICE=cuda"
        if _torch_cuda() is None
        else f"torch is built for CUDA {_torch_cuda()}: check that the driver supports it (`nvidia-smi` shows its CUDA "
        "version) and that CUDA_VISIBLE_DEVICES is not empty",
    )


def _torch_cuda() -> str | None:
    """Return the CUDA version that torch is built for, without importing torch; None: a CPU build."""
    package = _package("torch")
    source = (text_of(package / "version.py") or "") if package else ""
    match = re.search(r"^cuda\b.*=\s*'([\d.]+)'", source, re.MULTILINE)
    return match[1] if match else None


def _communication_op(has_gpu: bool) -> Finding:
    """Check DeepSpeed's shared-memory op for CPUs; unless built, each new home folder compiles it at first use."""
    what = "DeepSpeed"
    package = _package("deepspeed")
    if package is None:
        return Finding(what, "problem", "not installed", "make install")
    if has_gpu:
        return Finding(what, "ok", "GPUs communicate by NCCL; nothing needs to be compiled")
    if any((package / "ops" / "comm").glob("deepspeed_shm_comm_op*.so")):
        return Finding(what, "ok", "its communication op is built; no compiler is needed")
    missing = " and ".join(name for name in ("g++", "ninja") if shutil.which(name) is None)
    text = "its communication op is not built, so the first training in each new home folder compiles it"
    return Finding(
        what,
        "problem" if missing else "warning",
        f"{text}; without {missing} it fails"
        if missing
        else f"{text} for half a minute; if that is killed, later trainings hang",
        "build it once, with g++, ninja and Python's headers: `DS_BUILD_SHM_COMM=1 pip install --force-reinstall "
        "--no-deps --no-build-isolation -c constraints.txt deepspeed`, or reinstall: rm -rf .venv && make install",
    )


def _package(name: str) -> Path | None:
    """Return the folder of an installed package, without importing it; None if it is not installed."""
    spec = importlib.util.find_spec(name)
    locations = list(spec.submodule_search_locations or ()) if spec else []
    return Path(locations[0]) if locations else None


def cgroup_limits(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> tuple[float | None, int | None]:
    """Return (cores, bytes of memory) that this process's control groups, version 1 or 2, allow; None: no limit."""
    cores: list[float] = []
    memory: list[int] = []
    for line in (text_of(membership) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):  # "" in version 2, which has one tree, at the root itself
            tree = root / controller
            group = tree / path.lstrip("/")
            for folder in (group, *group.parents):  # a limit holds for all groups below it
                if not folder.is_relative_to(tree):
                    break
                quota = (text_of(folder / "cpu.max") or "").split()
                quota = quota or [text_of(folder / f"cpu.cfs_{name}_us") or "max" for name in ("quota", "period")]
                if quota[0].isdigit() and quota[1].isdigit():  # else "max", or -1
                    cores.append(int(quota[0]) / int(quota[1]))
                limits = (text_of(folder / name) or "max" for name in ("memory.max", "memory.limit_in_bytes"))
                memory += [int(limit) for limit in limits if limit.isdigit()]
    return min(cores, default=None), min(memory, default=None)


def text_of(path: Path) -> str | None:
    """Return a small file's text without surrounding space; None if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
