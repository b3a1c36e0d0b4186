"""Real S3 servers for tests, on loopback: moto's at once, Ceph's where it is installed, and a proxy that fails."""

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from werkzeug import Request, Response

from tests.support.paths import SHARED
from tests.support.serving import WSGI, break_off, hang_up, serving

CEPH_UP = SHARED / "s3" / "ceph-up"
CEPH_PROGRAMS = ("ceph-mon", "ceph-osd", "ceph-mgr", "radosgw", "radosgw-admin", "ceph", "curl")


@dataclass(frozen=True)
class Server:
    """An S3 server and keys that it takes."""

    endpoint: str
    access_key: str
    secret_key: str
    application: WSGI | None = None

    @property
    def keys(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to use it."""
        return self.keys | {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @cached_property  # it costs 0.2 s
    def client(self) -> Any:
        """A client of the test's own, with nothing of what the store sets."""
        import boto3
        from botocore.config import Config

        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(request_checksum_calculation="when_required"),
        )

    def bucket(self) -> "Bucket":
        """A new, empty bucket."""
        name = f"test-{secrets.token_hex(6)}"
        client = self.client
        client.create_bucket(Bucket=name)
        return Bucket(name, client)


@dataclass(frozen=True)
class Bucket:
    """A bucket, as seen behind a store's back."""

    name: str
    client: Any

    def objects(self, prefix: str = "") -> dict[str, int]:
        """Every object's name and size."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        return {entry["Key"]: entry["Size"] for page in pages for entry in page.get("Contents", ())}

    def read(self, name: str) -> bytes:
        return bytes(self.client.get_object(Bucket=self.name, Key=name)["Body"].read())

    def read_all(self) -> list[bytes]:
        return [self.read(name) for name in self.objects()]

    def manifests(self) -> dict[str, dict[str, Any]]:
        """Stage -> manifest, of a store in this bucket."""
        names = [name for name in self.objects() if name.endswith("/manifest.json") and "/files/" not in name]
        return {manifest["stage"]: manifest for name in names if (manifest := json.loads(self.read(name)))}

    def write(self, name: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=name, Body=data)


def free_port(count: int = 1) -> int:
    """The first of some free ports in a row."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
        try:
            for number in range(1, count):
                with socket.socket() as next_one:
                    next_one.bind(("127.0.0.1", port + number))
        except OSError:
            continue
        return port


@contextmanager
def running_moto() -> Iterator[Server]:
    """moto's server, in threads of this process."""
    from moto.server import DomainDispatcherApplication, create_backend_app

    application = DomainDispatcherApplication(create_backend_app)
    with serving(application) as endpoint:
        yield Server(endpoint, "motoaccess", "motosecret" + secrets.token_hex(8), application)


def missing_ceph() -> str | None:
    """What keeps Ceph from being started; None where nothing does."""
    if not CEPH_UP.exists():
        return f"{CEPH_UP} is not there, which starts a Ceph"
    if missing := [program for program in CEPH_PROGRAMS if shutil.which(program) is None]:
        return f"Ceph is not installed ({', '.join(missing)}): see the head of {CEPH_UP}"
    return None


def end_to_end_server() -> str:
    """The fixture of the server that is nearest to what people use."""
    return "moto" if missing_ceph() else "ceph"


@contextmanager
def running_ceph() -> Iterator[Server]:
    """A Ceph of one node with radosgw; the test is skipped where it is not installed."""
    if missing := missing_ceph():
        pytest.skip(missing)
    folder = Path(tempfile.mkdtemp(prefix="vfc-"))  # short: Ceph has sockets in it
    try:
        with (folder / "up.log").open("wb") as log:  # a file: its daemons keep stderr open
            said = subprocess.run(
                [CEPH_UP, folder / "ceph", str(free_port(3))],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                timeout=180,
            )
        assert said.returncode == 0, (folder / "up.log").read_text()
        given = dict(re.findall(r"(AWS_\w+)=(\S+)", said.stdout))
        yield Server(given["AWS_ENDPOINT_URL"], given["AWS_ACCESS_KEY_ID"], given["AWS_SECRET_ACCESS_KEY"])
    finally:
        subprocess.run([CEPH_UP, "--stop", folder / "ceph"], check=False, timeout=60)
        shutil.rmtree(folder, ignore_errors=True)  # the daemons are about to end


_present: list[Server] = []  # whom the store's client of this process is for


@contextmanager
def used(server: Server, patch: pytest.MonkeyPatch, **changes: str) -> Iterator[Server]:
    """This process, and those it starts, use the server; `changes` to the environment are for this use only."""
    from pipelines.files import s3_client

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        patch.delenv(name)
    for name, value in (server.environment | changes).items():
        patch.setenv(name, value)
    if changes or _present != [server]:
        s3_client.client.cache_clear()
    _present[:] = [] if changes else [server]
    yield server


# ------------------------------------------------------------------------------------------------- a proxy that fails


@dataclass
class Fault:
    """What happens to the next `times` requests of this method whose path or query has `part` in it.

    A status other than 0 is answered in the server's place, with S3's `code`. `lost`: the server does it, and its
    answer never arrives. `half`: the connection breaks in the middle of the answer's body. `mute`: no answer comes.
    """

    method: str
    part: str = ""
    status: int = 0
    code: str = "InternalError"
    lost: bool = False
    half: bool = False
    mute: bool = False
    times: int = 1


@dataclass
class Proxy:
    """Stands before a server: `seen` is what was asked, (method, path with query, status, headers)."""

    application: WSGI
    faults: list[Fault] = field(default_factory=list)
    seen: list[tuple[str, str, int, Any]] = field(default_factory=list)
    drop: str = ""  # a header that the server does not get
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, method: str, path: str) -> Fault:
        with self.lock:
            for fault in self.faults:
                if fault.times and fault.method == method and fault.part in path:
                    fault.times -= 1
                    return fault
        return Fault(method)  # nothing happens to it

    def asked(self, method: str, part: str = "") -> list[int]:
        """The statuses of these requests."""
        return [status for verb, path, status, _ in self.seen if verb == method and part in path]

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        request = Request(environ)
        path = request.full_path.rstrip("?")
        fault = self.take(request.method, path)
        if fault.mute:
            time.sleep(2)
            hang_up(environ)
        if fault.status:
            text = f"<Error><Code>{fault.code}</Code><Message>told to</Message></Error>"
            response = Response(text, fault.status, content_type="application/xml")
        else:
            environ.pop(f"HTTP_{self.drop.upper().replace('-', '_')}", None)
            response = Response.from_app(self.application, environ, buffered=True)
        self.seen.append((request.method, path, response.status_code, request.headers))
        if fault.lost:
            hang_up(environ)
        return break_off(response, environ, start) if fault.half else response(environ, start)


@contextmanager
def faulty(server: Server) -> Iterator[tuple[Proxy, Server]]:
    """A proxy before moto, and the server as it is seen through it."""
    assert server.application is not None
    proxy = Proxy(server.application)
    with serving(proxy) as endpoint:
        yield proxy, Server(endpoint, server.access_key, server.secret_key)


# ------------------------------------------------------------------------------------------------- fixtures


@pytest.fixture(scope="session")
def moto() -> Iterator[Server]:
    """One for all tests."""
    with running_moto() as server:
        yield server


@pytest.fixture(scope="session")
def ceph() -> Iterator[Server]:
    """One for all tests."""
    with running_ceph() as server:
        yield server
