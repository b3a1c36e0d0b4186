"""A run's driver as a Ray job on a cluster's head, so that the submitting machine can be switched off.

The driver is the same as in the foreground and keeps no state, so several submissions of one run do no harm. Ray
accepts a submission id, `driver-<run>-<store>-<n>`, once; the next id is used when that driver has ended. A hash of the
store's address is in it, because a copy of a store has the same runs and may use the same Ray.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from pipelines.cluster.jobs_client import LOOPBACK, Cluster, ClusterUnreachable, connect, python_entrypoint
from pipelines.engine.runs import Clusters, Run
from pipelines.identity import sha256
from pipelines.spec import RecipeError
from pipelines.store import Store, add_event, read_events
from vit_model.errors import UserError

# File systems that several machines may share; any other is assumed to be local.
SHARED = (
    *("nfs", "cifs", "smb", "ceph", "lustre", "gpfs"),
    *("beegfs", "gluster", "9p", "fuse", "afs", "orangefs"),
)


class Connection(Protocol):
    """The driver's way to a cluster; it decides what to do when the cluster is gone."""

    def cluster(self) -> Cluster:
        """Return the cluster, after starting it or connecting again if needed."""

    def keep(self) -> None:
        """Keep the cluster alive; called at every poll."""


@dataclass(frozen=True)
class ClusterConnection:
    """A driver's connection to an existing cluster."""

    client: Cluster

    def cluster(self) -> Cluster:
        """Return the cluster."""
        return self.client

    def keep(self) -> None:
        """Do nothing: others keep the cluster alive."""


def reach(address: str, token_file: Path | None) -> Cluster:
    """Return a client of the cluster at `address`, after it has answered once.

    Raises:
        RecipeError: the address is invalid, no Ray answers there, or it refuses the token.
        ClusterUnreachable: nothing answers there.
    """
    check_address(address)
    unusable = "--address: no usable Ray cluster"
    try:
        cluster = connect(address, token_file)
        cluster.session_name  # noqa: B018 (sends a request)
    except ClusterUnreachable as error:
        raise ClusterUnreachable(f"{unusable}: {error}", error.refused_on_loopback) from None
    except UserError as error:
        raise RecipeError(f"{unusable}: {error}") from None
    return cluster


def check_address(address: str) -> None:
    """Raise RecipeError if an address is not a URL, as a dashboard's is."""
    if not address.startswith(("http://", "https://")) or not urlsplit(address).hostname:
        raise RecipeError(f"--address {address}: expected the URL of Ray's dashboard, such as http://HOST:8265")


def reached(address: str | None, token_file: Path | None) -> Clusters:
    """Return how to reach the cluster that a record names: at `address` if given, else at the recorded address."""
    from pipelines.cluster.local import connect_running

    if address is None:
        return connect_running
    cluster = reach(address, token_file)
    return lambda _: cluster


def check_store(uri: str, address: str) -> None:
    """Check that a cluster can see the store.

    Raises:
        RecipeError: the cluster is on another machine, and the store is a relative folder or on a local file system;
            or the address is invalid.
    """
    check_address(address)
    if uri.startswith("s3://") or is_loopback(address):
        return
    remedy = "use s3://bucket/prefix, or a folder on a file system that all machines share"
    if not Path(uri).is_absolute():
        raise RecipeError(f"--store {uri}: a relative folder is a different one on the cluster at {address}; {remedy}")
    kind = _file_system(Path(uri))
    if not kind.startswith(SHARED):
        raise RecipeError(f"--store {uri}: it is on {kind}, which only this machine sees; {remedy}")


def is_loopback(address: str) -> bool:
    """Whether a cluster's address is on this machine's loopback interface."""
    return urlsplit(address).hostname in LOOPBACK


def submit_driver(store: Store, run: Run, cluster: Cluster, parallel: int | None, ray_folder: Path | None) -> str:
    """Submit the run's driver to a cluster, unless one is running there; return its submission id.

    Args:
        parallel: stages to run in parallel; None leaves it to the driver.
        ray_folder: the local Ray's folder; the driver keeps that Ray alive until the run ends. None: another cluster.

    Raises:
        ClusterUnreachable: submit it again. UserError: the cluster refuses it.
    """
    submission_id, is_running = last_driver(store, run.id, cluster)
    if not is_running:
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
            store_uri=store.uri,
            host=socket.gethostname(),
            cluster_address=cluster.address,
            cluster_session=cluster.session_name,
        )
    return submission_id


def last_driver(store: Store, run: str, cluster: Cluster) -> tuple[str, bool]:
    """Return the id of a run's driver on a cluster, and whether it is running; if none is, the id of the next one.

    It may not be in the run's events, if whoever submitted it was killed.
    """
    for number in count(1):
        job = cluster.job(submission_id := driver_id(store, run, number))
        if job is None or not job.ended:
            break
    return submission_id, job is not None


@contextmanager
def target(address: str | None, token_file: Path | None) -> Iterator[tuple[Cluster, Path | None]]:
    """Yield the cluster to submit to and, if that is the local Ray (started if needed), its folder.

    Raises:
        RecipeError, ClusterUnreachable: the cluster at `address` cannot be used.
        LocalRayError: the local Ray cannot be started.
    """
    if address is not None:
        yield reach(address, token_file), None
        return
    from pipelines.cluster.local import hold

    with hold() as ray:
        yield ray.cluster(), ray.folder


def driver_id(store: Store, run: str, number: int) -> str:
    """Return the submission id of a run's driver, numbered from 1."""
    return f"driver-{run}-{sha256(store.uri)[:8]}-{number}"


def _file_system(path: Path) -> str:
    """Return the type of the file system of a path, which need not exist yet."""
    import psutil

    path = path.resolve()
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    return next((mounts[parent] for parent in (path, *path.parents) if parent in mounts), "unknown")
