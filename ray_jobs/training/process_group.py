"""Set up the process group of a training under Ray Train: through a file and over loopback on one machine.

torch's default is a TCPStore, which listens on every interface and accepts anyone. Only workers on several machines
need it (infra/README.md says which ports to close there); for those Ray Train makes the group as usual.
"""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import ray
from ray.train.torch import TorchConfig

from ray_jobs.process import devices


class _Meeting(TorchConfig().backend_cls):  # type: ignore[misc]  # (Ray has no types)
    """Ray Train's set-up of the workers, except that those on one machine use a file."""

    folder: str | None = None

    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        """Make the group; called once the workers are up, before they train."""
        if len(set(worker_group.execute(_node))) > 1:
            super().on_start(worker_group, backend_config)
            return
        # readable by this user alone, and new, so that it cannot be another group's file
        self.folder = worker_group.execute_single(0, tempfile.mkdtemp, prefix="vitflow-group-")
        world = len(worker_group)
        ray.get(
            [
                worker_group.execute_single_async(rank, _join, f"file://{self.folder}/store", rank, world)
                for rank in range(world)
            ]
        )

    def on_shutdown(self, worker_group: Any, backend_config: TorchConfig) -> None:
        """Leave the group; not called if a worker or the controller was killed, which leaves an empty folder."""
        super().on_shutdown(worker_group, backend_config)
        if self.folder is not None:
            worker_group.execute_single(0, shutil.rmtree, self.folder, ignore_errors=True)


class OnOneMachine(TorchConfig):
    """For a TorchTrainer; its workers use a file if they are on one machine."""

    @property
    def backend_cls(self) -> type[_Meeting]:
        return _Meeting


def _node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _join(where: str, rank: int, world: int) -> None:
    import torch.distributed as dist

    devices.stay_on_loopback()
    dist.init_process_group(devices.backend(), init_method=where, rank=rank, world_size=world)
