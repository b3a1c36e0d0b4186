"""A run's driver as a Ray job on a cluster's head: the submitting machine can then be switched off.

The driver is the same as in the foreground and keeps no state, so that any number of submissions of one run do no harm;
a submission id, `driver-<run>-<n>`, is taken once, and the next is for a driver that has ended.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pipelines.cluster.jobs_client import LOOPBACK, Cluster, ClusterUnreachable, connect, python_entrypoint
from pipelines.engine.runs import Clusters, Run
from pipelines.spec import RecipeError
from pipelines.store import Store, add_event, read_events
from vit_model.errors import UserError

# File systems that several machines may see; any other is taken to be this machine's own.
SHARED = (
    "nfs",
    "cifs",
    "smb",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "gluster",
    "9p",
    "fuse",
    "afs",
    "orangefs",
)


@dataclass(frozen=True)
class ClusterConnection:
    """A driver's way to a cluster that is there already, whatever becomes of it."""

    client: Cluster

    def cluster(self) -> Cluster:
        """The cluster."""
        return self.client

    def keep(self) -> None:
        """Nothing: it is not ours."""


def reach(address: str, token_file: Path | None) -> Cluster:
    """A client of the cluster at `address`, which has answered.

    Raises:
        RecipeError: the address is invalid, it has no Ray, or the token is refused.
        ClusterUnreachable: nothing answers there.
    """
    check_address(address)
    unusable = "--address: no usable Ray cluster"
    try:
        cluster = connect(address, token_file)
        cluster.session_name  # noqa: B018 (asks)
    except ClusterUnreachable as error:
        raise ClusterUnreachable(f"{unusable}: {error}", error.refused_on_loopback) from None
    except UserError as error:
        raise RecipeError(f"{unusable}: {error}") from None
    return cluster


def check_address(address: str) -> None:
    """Refuse what is no address of a dashboard. Raises RecipeError."""
    if not address.startswith(("http://", "https://")) or not urlsplit(address).hostname:
        raise RecipeError(
            f"--address {address}: write the address of Ray's dashboard, as in http://HOST:8265"
        )


def reached(address: str | None, token_file: Path | None) -> Clusters:
    """How to ask the cluster that a record names: at the address given, as it is seen from here, else at its own."""
    from pipelines.cluster.local import connect_running

    if address is None:
        return connect_running
    cluster = reach(address, token_file)
    return lambda _: cluster


def check_store(uri: str, address: str) -> None:
    """Refuse a store that the cluster can't see.

    Raises:
        RecipeError: it is relative, or lies on a file system of this machine, and the cluster is elsewhere; or the
            address is none.
    """
    check_address(address)
    if uri.startswith("s3://") or is_loopback(address):
        return
    better = "give s3://bucket/prefix, or a folder on a file system that all machines share"
    if not Path(uri).is_absolute():
        raise RecipeError(
            f"--store {uri}: a relative folder is another one on the cluster at {address}: {better}"
        )
    kind = _file_system(Path(uri))
    if not kind.startswith(SHARED):
        raise RecipeError(f"--store {uri}: it lies on {kind}, which only this machine sees: {better}")


def is_loopback(address: str) -> bool:
    """Whether a cluster's address is one of this machine."""
    return urlsplit(address).hostname in LOOPBACK


def submit_driver(
    store: Store, run: Run, cluster: Cluster, parallel: int | None, ray_folder: Path | None
) -> str:
    """Submit the run's driver to a cluster, unless one is at work there: its submission id.

    Args:
        parallel: stages at once; None leaves it to the driver.
        ray_folder: of the local Ray, which the driver keeps alive until the run is over; None for another cluster.

    Raises:
        ClusterUnreachable: submit again; UserError: the cluster refuses it.
    """
    number = 1
    while (job := cluster.job(submission_id := f"driver-{run.id}-{number}")) is not None:
        if not job.ended:
            break
        number += 1
    if job is None:
        command = ["-m", "pipelines", "drive", run.id, "--store", store.uri]
        command += ["--parallel", str(parallel)] if parallel is not None else []
        command += ["--local-ray", str(ray_folder)] if ray_folder is not None else []
        cluster.submit(submission_id, python_entrypoint(*command), store.settings, {"run": run.id})
    if not any(event.get("submission_id") == submission_id for event in read_events(store, run.id)):
        add_event(
            store,
            run.id,
            "driver submitted",
            submission_id=submission_id,
            host=socket.gethostname(),
            cluster_address=cluster.address,
            cluster_session=cluster.session_name,
        )
    return submission_id


@contextmanager
def target(address: str | None, token_file: Path | None) -> Iterator[tuple[Cluster, Path | None]]:
    """The cluster to submit to and, where that is the local Ray (started if needed), its folder.

    Raises:
        RecipeError, ClusterUnreachable: the cluster at `address` can't be used.
        LocalRayError: the local Ray can't be started.
    """
    if address is not None:
        yield reach(address, token_file), None
        return
    from pipelines.cluster.local import hold

    with hold() as ray:
        yield ray.cluster(), ray.folder


def _file_system(path: Path) -> str:
    """The type of the file system that a path lies on, or will."""
    import psutil

    path = path.resolve()
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    return next((mounts[parent] for parent in (path, *path.parents) if parent in mounts), "unknown")
