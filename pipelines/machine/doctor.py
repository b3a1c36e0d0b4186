"""`vitflow doctor`: checks of the store, Ray and this machine, with what to do about each problem.

In: a store's address, and optionally a cluster's. Out: `Finding`s, each from a real probe: several writers create one
name in the store at once, and the cluster gets requests with and without its token.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from ulid import ULID

from pipelines.cluster.head import processes_of, read_head
from pipelines.cluster.jobs_client import LOOPBACK, Cluster, ClusterUnreachable, connect
from pipelines.cluster.local import state_folder
from pipelines.engine.submission import check_address, check_store
from pipelines.files import s3_client
from pipelines.files.hashing import cache_folder
from pipelines.files.s3 import parse
from pipelines.machine.findings import Finding, machine_findings, nearest_folder
from pipelines.results.verify import sample
from pipelines.spec import RecipeError
from pipelines.store import Layout, Store, StoreAbsent, StoreError, open_store
from pipelines.store.s3 import S3Store
from vit_model.errors import UserError

WRITERS = 8
SAMPLE = 8  # files to verify
CLOCK_SECONDS = 60.0  # S3 refuses requests from 15 minutes on; runs are sorted by the drivers' clocks
# older versions: CVE-2025-62593 and CVE-2026-27482, by which a visited web page may run code
SAFE_RAY = (2, 54)


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
        _installed_ray(),
        *(cluster_findings(address, token_file) if address is not None else _local_ray()),
        *machine_findings(places),
    ]


# ------------------------------------------------------------------------------------------------- the store


def store_findings(uri: str) -> Iterator[Finding]:
    """Check that it is a store, can be written, creates each name once, and has the same time."""
    try:
        store = open_store(uri, create=False)
        yield from _contents(store)
    except StoreAbsent as error:
        yield Finding("store", "ok", f"{error} yet; the first run creates it")
    except StoreError as error:
        yield Finding("store", "problem", str(error), "fix this, or use another --store")
        return
    probes = _s3_probes(uri) if uri.startswith("s3://") else _folder_probes(Path(uri))
    try:
        yield from probes
    except (StoreError, OSError) as error:
        yield Finding("writing", "problem", str(error), _WRITABLE)


def _contents(store: Store) -> Iterator[Finding]:
    """Report the size of the store, and any damage to its manifests or to a sample of its files."""
    verified = sample(store, SAMPLE)
    size = f"{store.uri}, with {len(store.names('runs'))} runs and {verified.artifacts} artifacts"
    yield Finding(
        "store", "ok", f"{size}; checked {verified.files} of their files, `vitflow verify` checks all"
    )
    for damage in verified.damage:
        yield Finding("store", "problem", damage.what, damage.do)
    for unread in verified.unread:
        yield Finding("store", "problem", unread.why, "give this user permission to read the store")


_WRITABLE = "give this user permission to write there, or use another --store"


def _folder_probes(path: Path) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(prefix=".vitflow-doctor-", dir=nearest_folder(path)) as place:
        yield conditional_writes(open_store(place))
        yield _clock("the store's file system", time.time() - (Path(place) / "probe").stat().st_mtime)


def _seen_from(address: str, uri: str) -> Iterator[Finding]:
    """Report a store that the cluster cannot see, as far as this machine can tell."""
    try:
        check_store(uri, address)
    except RecipeError as error:
        yield Finding("store", "problem", str(error), "use a store that both machines see")


def conditional_writes(store: Store) -> Finding:
    """Check that exactly one of several writers of a name wins and its bytes stay, on which the store relies."""
    own = [f"writer {number}".encode() for number in range(WRITERS)]
    with ThreadPoolExecutor(WRITERS) as threads:
        won = list(threads.map(lambda data: store.create("probe", data), own))
    late = store.create("probe", b"a late writer")
    kept = store.read("probe")
    if won.count(True) == 1 and not late and kept == own[won.index(True)]:
        return Finding("writing", "ok", f"of {WRITERS + 1} writers of one name exactly one won")
    system = "server" if store.uri.startswith("s3://") else "file system"
    outcome = f"of {WRITERS} writers of one name {won.count(True)} were told that they won"
    outcome += ", and a later one too" if late else ""
    return Finding(
        "writing",
        "problem",
        f"{outcome}: this {system} overwrites existing objects, so two drivers would destroy each other's results",
        "use a store that creates a name only once: AWS S3, Ceph, MinIO or another server that honours "
        "`If-None-Match: *`, or a folder on a file system with hard links",
    )


def _s3_probes(uri: str) -> Iterator[Finding]:
    # a store below the store: nothing else reads it, and it does no harm if it cannot be removed
    probe = f"{uri.rstrip('/')}/doctor-{ULID()}"
    try:
        probed = S3Store(probe)
        yield conditional_writes(probed)
        before = time.time()
        yield _http_clock("the S3 server", probed.server_date(), before)
    except StoreError as error:
        yield Finding("writing", "problem", str(error), _WRITABLE)
    if (problem := _remove_objects(probe)) is not None:
        message = f"cannot remove the probe's two small objects ({problem})"
        yield Finding("writing", "warning", message, f"remove {probe}/ by hand, or leave it")


def _remove_objects(uri: str) -> str | None:
    """Remove a probe (a versioned bucket keeps old versions); return the error if that fails."""
    bucket, prefix = parse(uri)
    try:
        with s3_client.translate_errors(uri, "remove it"):
            for name in (Layout.STORE, "probe"):
                s3_client.client().delete_object(Bucket=bucket, Key=f"{prefix[1:]}/{name}")
    except StoreError as error:
        return str(error)
    return None


def _http_clock(whose: str, date: str, before: float) -> Finding:
    """Check the clock of a server by the `date` of its answer, in whole seconds, to a request sent at `before`."""
    try:
        server_time = parsedate_to_datetime(date).timestamp()
    except ValueError:
        return Finding("clock", "warning", f"{whose} does not send its time", "compare the clocks yourself")
    middle = (before + time.time()) / 2
    return _clock(whose, middle - server_time - 0.5)


def _clock(whose: str, ahead: float) -> Finding:
    if abs(ahead) <= CLOCK_SECONDS:
        return Finding("clock", "ok", f"agrees with that of {whose} within {max(1.0, abs(ahead)):.0f} s")
    return Finding(
        "clock",
        "problem",
        f"this machine's is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} that of {whose}",
        "correct it (`timedatectl set-ntp true`): S3 refuses requests, and runs are sorted by their times",
    )


# ------------------------------------------------------------------------------------------------- Ray


def _installed_ray() -> Finding:
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return Finding("Ray", "problem", "not installed", "make install")
    if _is_unsafe(version):
        return Finding("Ray", "problem", *_unsafe(version, "installed"))
    return Finding("Ray", "ok", f"{version} is installed")


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
    """Check that a cluster answers, and its version, its token, who can reach it, and its clock.

    `listening`: the addresses at which its processes listen, if these are known.
    """
    before = time.time()
    try:
        cluster = connect(address, token_file)
        about = cluster.about()
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
    yield _version(what, cluster, about["ray_version"])
    yield _exposure(what, cluster, listening)
    yield _http_clock(f"the {what}", about["date"], before)


def _version(what: str, cluster: Cluster, version: str) -> Finding:
    installed = importlib.metadata.version("ray")
    if _is_unsafe(version):
        return Finding(what, "problem", *_unsafe(version, f"running at {cluster.address}"))
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


def _is_unsafe(version: str) -> bool:
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is not None and (int(match[1]), int(match[2])) < SAFE_RAY


def _unsafe(version: str, state: str) -> tuple[str, str]:
    return (
        f"{version} is {state}; a web page can run code through its vulnerabilities (CVE-2025-62593, CVE-2026-27482)",
        f"upgrade to {'.'.join(map(str, SAFE_RAY))} or newer",
    )
