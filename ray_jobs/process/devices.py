"""What the machine has, found out and never assumed: GPUs of the cluster, the device of a worker, its threads.

In: nothing but the machine. Out: a device, a communication backend, a checked dtype. Importing this imports neither
torch nor ray.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vit_model.errors import UserError

if TYPE_CHECKING:
    import torch


def gpus_in_cluster() -> int:
    """GPUs of the Ray cluster that this process has joined, busy ones included."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0))


def cpus_in_cluster() -> int:
    """CPUs of the Ray cluster that this process has joined, busy ones included."""
    import ray

    return int(ray.cluster_resources().get("CPU", 1))


def scaling(workers: int, threads: int) -> Any:
    """What Ray Train gives each worker: a GPU where the cluster has some, and the CPUs of its threads.

    On a cluster with fewer CPUs than asked for the workers share them, which is slower and gives the same numbers.
    Raises UserError when there are GPUs, but too few.
    """
    from ray.train import ScalingConfig

    gpus = gpus_in_cluster()
    if 0 < gpus < workers:
        raise UserError(f"workers is {workers}, but the cluster has {gpus} GPUs: use workers: {gpus}")
    cpus = min(float(threads), cpus_in_cluster() / workers)
    resources = {"CPU": cpus, "GPU": 1.0} if gpus else {"CPU": cpus}
    return ScalingConfig(num_workers=workers, use_gpu=gpus > 0, resources_per_worker=resources)


def default_workers(batch_size: int) -> int:
    """Workers where none were asked for: as many GPUs as can share the batch; on CPUs two, or one."""
    most = gpus_in_cluster() or 2
    return next(workers for workers in range(most, 0, -1) if batch_size % workers == 0)


def fit_resources(threads: int) -> tuple[dict[str, float], int]:
    """(what one fit on one device asks of Ray, how many of them the cluster can run at once)."""
    cpus, gpus = cpus_in_cluster(), gpus_in_cluster()
    share = float(min(threads, cpus))
    if gpus:
        return {"CPU": share, "GPU": 1.0}, gpus
    return {"CPU": share}, max(1, int(cpus / share))


def device(local_rank: int = 0) -> torch.device:
    """The device of this process; the workers on one machine take one each."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def backend() -> str:
    """How workers on this kind of device talk: NCCL between GPUs, else gloo."""
    import torch

    return "nccl" if torch.cuda.is_available() else "gloo"


def stay_on_loopback() -> None:
    """Make the groups that this process will join, all on this machine, listen on loopback only.

    By default gloo's pairs and NCCL's bootstrap take the interface of the host's name.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def set_threads(threads: int) -> None:
    """Give torch's operators this many CPU threads; numbers are the same for the same count only."""
    import torch

    torch.set_num_threads(threads)


def torch_dtype(name: str, on: torch.device) -> torch.dtype:
    """The dtype of matrix products, checked against the device.

    Raises:
        UserError: the GPU has no bfloat16.
    """
    import torch

    if (
        name == "bfloat16"
        and on.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise UserError(
            f"dtype is bfloat16, which {torch.cuda.get_device_name(on)} lacks; use dtype: float32"
        )
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def import_deepspeed() -> Any:
    """The deepspeed module, told to use the CPU where there is no GPU (it decides while it is imported)."""
    import torch

    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    import deepspeed

    return deepspeed
