"""Set up torch's process group under Ray Train: through a file and over loopback if all workers are on one machine.

torch's default is a TCPStore, which listens on every interface and accepts any client. Only workers on several machines
need it; infra/README.md says which ports to close there.

Ray Train's configuration for torch also imports torch in the stage's process and in the controller that it starts for
every group of workers: 2.5 s each. Here only the workers import it.
"""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from ray_jobs.process import devices

COLLECTIVE_SECONDS = 600  # the longest time that a worker waits for the others in one operation
_LEAVE_SECONDS = 10.0


class LocalTorchConfig(BackendConfig):
    """The `backend_config` of a trainer whose workers meet through a file if they are on one machine."""

    @property
    def backend_cls(self) -> type[_LocalBackend]:
        return _LocalBackend

    @property
    def train_func_context(self) -> type[_TrainContext]:
        return _TrainContext


class _LocalBackend(Backend):
    """Ray Train's backend for torch, except on one machine."""

    share_cuda_visible_devices = True
    folder: str | None = None

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Create the process group; called when the workers are up, before they train."""
        if len(set(worker_group.execute(_node))) > 1:
            from ray.train.torch import TorchConfig

            worker_group.execute(_limit_collectives)
            TorchConfig().backend_cls().on_start(worker_group, TorchConfig(timeout_s=COLLECTIVE_SECONDS))
            return
        # A new folder that only this user can read, so the file cannot be another group's.
        self.folder = worker_group.execute_single(0, tempfile.mkdtemp, prefix="vitflow-group-")
        world = len(worker_group)
        ray.get(
            [
                worker_group.execute_single_async(rank, _join, f"file://{self.folder}/store", rank, world)
                for rank in range(world)
            ]
        )

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Leave the group. Not called if a worker or the controller was killed; an empty folder then remains."""
        leaving = worker_group.execute_async(_leave)
        # not longer, because a worker hangs if it waits for one that has died
        ray.wait(leaving, num_returns=len(leaving), timeout=_LEAVE_SECONDS)
        if self.folder is not None:
            removed = worker_group.execute_single_async(0, shutil.rmtree, self.folder, ignore_errors=True)
            ray.wait([removed], timeout=_LEAVE_SECONDS)


class _TrainContext:
    """Ray Train's context for training functions that use torch, which selects the worker's GPU."""

    def __enter__(self) -> None:
        from ray.train.torch import TorchConfig

        self._context = TorchConfig().train_func_context()
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


def _node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _join(init_method: str, rank: int, world: int) -> None:
    import torch.distributed as dist

    _limit_collectives()
    devices.stay_on_loopback()
    dist.init_process_group(devices.backend(), init_method=init_method, rank=rank, world_size=world)


def _limit_collectives() -> None:
    from ray_jobs.training.hangs import limit_collectives

    limit_collectives(COLLECTIVE_SECONDS)


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
