"""Set up torch's process group under Ray Train: through a file and over loopback if all workers are on one machine.

Workers on several machines meet in a TCPStore and connect over the interfaces that have the nodes' addresses in Ray. By
default, torch uses a TCPStore that listens on every interface, and the address that the host name resolves to, which is
loopback on many machines. The TCPStore accepts any client; infra/README.md says which ports to close.

Ray Train's configuration for torch also imports torch in the stage's process and in the controller that it starts for
every group of workers: 2.5 s each. Here only the workers import it.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import psutil
import ray
from ray.train.backend import Backend, BackendConfig

from pipelines.scratch import scratch_folder
from vit_model.errors import UserError

COLLECTIVE_SECONDS = 600  # the longest time that a worker waits for the others in one operation
_LEAVE_SECONDS = 10.0
_DEATH_SECONDS = 10.0  # after a failure that a worker's death may have caused, until Ray reports that death
_REASON = 160  # characters of a library's error in a message
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # what gloo and NCCL read
_CONTROLLER = "ray.train.v2._internal.execution.controller.controller"

# On the first worker: the folder or the TCPStore in which the group meets.
_folder = ExitStack()
_store: Any = None


class LocalTorchConfig(BackendConfig):
    """The `backend_config` of a trainer whose workers meet through a file if they are on one machine."""

    @property
    def backend_cls(self) -> type[_LocalBackend]:
        return _LocalBackend

    @property
    def train_func_context(self) -> type[_TrainContext]:
        return _TrainContext


class _LocalBackend(Backend):
    """A backend of Ray Train that creates and leaves torch's process group."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Create the process group; called when the workers are up, before they train.

        Raises:
            UserError: the workers live, but cannot connect.
            RayActorError: a worker has died.
        """
        nodes = worker_group.execute(_node)
        if len(set(nodes)) > 1:
            hosts = dict(zip(nodes, worker_group.execute(_choose_interface), strict=True))
            print(f"workers on {len(hosts)} hosts connect over {', '.join(hosts.values())}", flush=True)
            meeting: str | tuple[str, int] = worker_group.execute_single(0, _open_store)
        else:
            worker_group.execute(stay_on_loopback)
            meeting = worker_group.execute_single(0, _open_folder)
        world = len(worker_group)
        joining = [worker_group.execute_single_async(rank, _join, meeting, rank, world) for rank in range(world)]
        while joining:
            [joined], joining = ray.wait(joining)
            if (reason := ray.get(joined)) is not None:
                # The others may wait for that worker until the time limit. If a worker died, report that instead.
                ray.get(ray.wait(joining, num_returns=len(joining), timeout=_DEATH_SECONDS)[0])
                # it logs what is raised here with a long stack
                logging.getLogger(_CONTROLLER).disabled = True
                raise UserError(reason)

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Leave the group. Not called if a worker or the controller was killed."""
        leaving = worker_group.execute_async(_leave)
        # A limit, because a worker that waits for one that has died hangs.
        ray.wait(leaving, num_returns=len(leaving), timeout=_LEAVE_SECONDS)


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


def stay_on_loopback() -> None:
    """Make the process groups that this process will join listen on loopback only; all ranks are on this machine.

    By default, gloo and NCCL's bootstrap listen on the interface that the host name resolves to.
    """
    os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="=lo")


def choose_interface(address: str) -> str:
    """Make gloo and NCCL use the interface that has this address, and return which interfaces they use.

    Interfaces that the environment names take precedence. If no interface has the address, as behind network address
    translation, the libraries choose.
    """
    matches = [
        name
        for name, entries in psutil.net_if_addrs().items()
        if any(entry.address.partition("%")[0] == address for entry in entries)
    ]
    configured = {name: value for name in _INTERFACES if (value := os.environ.get(name))}
    if matches:  # "=": NCCL takes the name for a prefix otherwise
        os.environ.update({"GLOO_SOCKET_IFNAME": matches[0], "NCCL_SOCKET_IFNAME": f"={matches[0]}"} | configured)
    chosen = matches[0] if matches else "no interface has this address"
    return ", ".join([chosen, *(f"{name}={value}" for name, value in configured.items())])


def _choose_interface() -> str:
    """Choose this worker's network interface, and describe it: address and name."""
    address = ray.util.get_node_ip_address()
    return f"{address} ({choose_interface(address)})"


def _open_folder() -> str:
    """Open a new folder that only this user can read, and return the path of the group's file in it."""
    return str(_folder.enter_context(scratch_folder()) / "store")


def _open_store() -> tuple[str, int]:
    """Open the TCPStore in the first worker, on its node's address only; return that address and the port."""
    from torch._C._distributed_c10d import TCPStore

    global _store
    address = ray.util.get_node_ip_address()
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
        port = server.getsockname()[1]
        _store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
    return address, port


def _join(meeting: str | tuple[str, int], rank: int, world: int) -> str | None:
    """Join the group whose store is a file or at (address, port); return the reason if that fails."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore, TCPStore

    from ray_jobs.process import devices
    from ray_jobs.training.workers.hangs import limit_collectives

    limit_collectives(COLLECTIVE_SECONDS)
    backend = devices.backend()
    try:
        if isinstance(meeting, str):
            store: Any = FileStore(meeting, world)
        else:
            store = _store or TCPStore(*meeting)
        store.set_timeout(timedelta(seconds=COLLECTIVE_SECONDS))
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    except (RuntimeError, OSError) as error:
        reason = re.sub(r"\[/\S+\] ", "", " ".join(str(error).split()))[:_REASON]  # without places in C++
        return (
            f"the workers cannot connect: rank {rank}, on {ray.util.get_node_ip_address()}: {reason}. The hosts of the "
            f"cluster must reach each other on all ports; {backend.upper()}_SOCKET_IFNAME in the environment of "
            "`ray start` chooses another network interface"
        )
    return None


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    _folder.close()
