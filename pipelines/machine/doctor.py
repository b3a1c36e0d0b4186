"""`vitflow doctor`: checks of the store, Ray and this machine, with a remedy for each problem.

In: a store's address, and optionally a cluster's. Out: `Finding`s, each from a real probe: a test store is created
beside a store in a folder, and the cluster gets requests with and without its token.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from pipelines.cluster.head import processes_of, read_head
from pipelines.cluster.jobs_client import LOOPBACK, Cluster, ClusterUnreachable, connect
from pipelines.cluster.local import state_folder
from pipelines.engine.submission import check_address, check_store
from pipelines.files.hashing import cache_folder
from pipelines.machine.findings import Finding, machine_findings, nearest_folder
from pipelines.spec import RecipeError, quantity
from pipelines.store import StoreAbsent, StoreError, all_keys, open_store
from vit_model.errors import UserError


def examine(uri: str, address: str | None, token_file: Path | None) -> list[Finding]:
    """Run all checks; this takes a few seconds.

    Raises:
        RecipeError: `address` is invalid.
    """
    if address is not None:
        check_address(address)
    places = {"the cache": cache_folder()}
    if not uri.startswith("s3://"):
        places = {"the store": Path(uri)} | places
    return [
        *store_findings(uri),
        *(_seen_from(address, uri) if address is not None else ()),
        *(cluster_findings(address, token_file) if address is not None else _local_ray()),
        *machine_findings(places),
    ]


# ------------------------------------------------------------------------------------------------- the store


def store_findings(uri: str) -> Iterator[Finding]:
    """Check that an address is a store, or that its folder can become one."""
    try:
        store = open_store(uri, create=False)
        runs, artifacts = quantity(len(store.names("runs")), "run"), quantity(len(all_keys(store)), "artifact")
        text = f"{store.uri}, with {runs} and {artifacts}, finished or not; `vitflow verify` reads them"
        yield Finding("store", "ok", text)
    except StoreAbsent as error:
        yield Finding("store", "ok", f"{error} yet; the first run creates it")
    except StoreError as error:
        yield Finding("store", "problem", str(error), "fix this, or use another --store")
        return
    if not uri.startswith("s3://"):
        yield _writing(Path(uri))


def _writing(path: Path) -> Finding:
    """Check that stores can be created where a folder is, or will be: it can be written, and has hard links."""
    try:
        with tempfile.TemporaryDirectory(prefix=".vitflow-doctor-", dir=nearest_folder(path)) as place:
            open_store(place)
    except (StoreError, OSError) as error:
        remedy = "give this user permission to write there, or use another --store"
        return Finding("writing", "problem", str(error), remedy)
    return Finding("writing", "ok", "its folder can be written and has hard links")


def _seen_from(address: str, uri: str) -> Iterator[Finding]:
    """Report a store that the cluster cannot see, as far as this machine can tell."""
    try:
        check_store(uri, address)
    except RecipeError as error:
        yield Finding("store", "problem", str(error), "use a store that both machines see")


# ------------------------------------------------------------------------------------------------- Ray


def _local_ray() -> Iterator[Finding]:
    folder = state_folder()
    head = read_head(folder)
    if head is None:
        yield Finding("local Ray", "ok", "not running; it is started when it is needed")
    elif not head.alive():
        yield Finding(
            "local Ray",
            "warning",
            f"it has died; its record is in {folder}",
            f"the next run cleans it up, as does `{sys.executable} -m pipelines.cluster.local stop`",
        )
    else:
        own = {process.pid for process in processes_of(head)}
        listening = {ip for ip, _, pid in _listening() if pid in own}
        yield from cluster_findings(head.address, folder / "token", "local Ray", listening)


def cluster_findings(
    address: str, token_file: Path | None, what: str = "cluster", listening: set[str] | None = None
) -> Iterator[Finding]:
    """Check that a cluster answers, and its version, its token, and who can reach it.

    `listening`: the addresses at which its processes listen, if these are known.
    """
    try:
        cluster = connect(address, token_file)
        version = cluster.about()["ray_version"]
    except ClusterUnreachable as error:
        remedy = (
            "check that it is running and that this is the address of its dashboard (port 8265); from outside, use an "
            "SSH tunnel or `kubectl port-forward service/<head> 8265`"
        )
        yield Finding(what, "problem", str(error), remedy)
        return
    except UserError as error:
        yield Finding(what, "problem", str(error), "use --token-file FILE, where FILE contains its token")
        return
    yield _version(what, cluster, version)
    yield _exposure(what, cluster, listening)


def _version(what: str, cluster: Cluster, version: str) -> Finding:
    installed = importlib.metadata.version("ray")
    if version != installed:
        return Finding(
            what,
            "warning",
            f"{cluster.address} runs Ray {version}, but {installed} is installed here",
            "jobs run with the cluster's version; install that version here, and this version of vitflow there",
        )
    return Finding(what, "ok", f"{cluster.address} answers, with Ray {version}")


def _exposure(what: str, cluster: Cluster, listening: set[str] | None) -> Finding:
    """Check who can run code on a cluster: everyone who reaches the port, or only those with the token."""
    address = urlsplit(cluster.address)
    is_local = address.hostname in LOOPBACK
    if not is_local:
        listening = {str(address.hostname)}
    elif listening is None:
        listening = {ip for ip, port, _ in _listening() if port == (address.port or 80)}
    reachable = sorted(ip for ip in listening if not _is_loopback(ip))
    listens = f"listens on {', '.join(reachable)}" if reachable else "listens only on this machine's loopback"
    what = f"{what}, access"
    if _allows_access_without_token(cluster.address):
        return Finding(
            what,
            "problem" if reachable else "warning",
            f"it requires no token and {listens}: "
            f"{'everyone who can reach it' if reachable else 'every user of this machine'} can run any code there",
            "start it with RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE (with mode 0600), and with "
            "--dashboard-host=127.0.0.1 behind a tunnel or an authenticating proxy",
        )
    if address.scheme == "http" and not is_local:
        return Finding(
            what,
            "warning",
            f"it requires a token, which is sent unencrypted to {address.hostname}",
            "use https, an SSH tunnel or `kubectl port-forward`, unless you trust the network",
        )
    return Finding(what, "ok", f"it requires a token, and {listens}")


def _allows_access_without_token(address: str) -> bool:
    try:
        Cluster(address).jobs()
    except (ValueError, ClusterUnreachable):  # refused, or not a Ray cluster
        return False
    return True


def _listening() -> Iterator[tuple[str, int, int | None]]:
    """Yield (address, port, process if it is ours) of listening sockets here; 0.0.0.0 and :: are all addresses."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN:
            local: Any = connection.laddr
            yield str(local.ip), int(local.port), connection.pid


def _is_loopback(host: str) -> bool:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False  # the name of another machine
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback
