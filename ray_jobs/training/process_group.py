"""Set up torch's process group under Ray Train: through a file and over loopback if all workers are on one machine.

torch's default is a TCPStore, which listens on every interface and accepts any client. Only workers on several machines
need it; infra/README.md says which ports to close there.
"""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import ray
import torch.distributed as dist
from ray.train.torch import TorchConfig

from ray_jobs.process import devices


class _LocalBackend(TorchConfig().backend_cls):  # type: ignore[misc]  # (Ray has no types)
    """Ray Train's backend for torch, except that workers on one machine meet through a file."""

    folder: str | None = None

    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        """Create the process group; called when the workers are up, before they train."""
        if len(set(worker_group.execute(_node))) > 1:
            super().on_start(worker_group, backend_config)
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

    def on_shutdown(self, worker_group: Any, backend_config: TorchConfig) -> None:
        """Leave the group. Not called if a worker or the controller was killed; an empty folder then remains."""
        super().on_shutdown(worker_group, backend_config)
        if self.folder is not None:
            worker_group.execute_single(0, shutil.rmtree, self.folder, ignore_errors=True)


class LocalTorchConfig(TorchConfig):
    """The `torch_config` of a TorchTrainer whose workers meet through a file if they are on one machine."""

    @property
    def backend_cls(self) -> type[_LocalBackend]:
        return _LocalBackend


def _node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _join(init_method: str, rank: int, world: int) -> None:
    devices.stay_on_loopback()
    dist.init_process_group(devices.backend(), init_method=init_method, rank=rank, world_size=world)
