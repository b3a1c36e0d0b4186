"""What is broken is found, what is well is not complained of, and looking leaves nothing behind."""

import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.commands import common
from pipelines.files.s3_client import client
from pipelines.machine import doctor, findings
from pipelines.machine.doctor import cluster_findings, store_findings
from pipelines.machine.findings import GIB, Finding
from pipelines.spec import RecipeError
from pipelines.store import open_store
from pipelines.store.folder import FolderStore


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def by_name(findings: Iterator[Finding]) -> dict[str, Finding]:
    found = list(findings)
    assert all(finding.said and bool(finding.do) == (finding.status != "ok") for finding in found)
    return {finding.what: finding for finding in found}


def statuses(findings: Iterator[Finding]) -> dict[str, str]:
    return {name: finding.status for name, finding in by_name(findings).items()}


# ------------------------------------------------------------------------------------------------- a folder

WELL = {"store": "ok", "writing": "ok", "clock": "ok"}


def everything_in(folder: Path) -> set[Path]:
    return {Path(parent) / name for parent, _, names in os.walk(folder) for name in [*names, "."]}


def test_a_folder_is_well_and_left_as_it_was(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    before = everything_in(tmp_path)
    found = by_name(store_findings(store.uri))
    assert {name: finding.status for name, finding in found.items()} == WELL
    assert everything_in(tmp_path) == before


def test_a_store_that_is_not_there_yet_is_well_and_not_made(tmp_path: Path) -> None:
    found = by_name(store_findings(str(tmp_path / "a" / "b")))
    assert {name: finding.status for name, finding in found.items()} == WELL
    assert "the first run creates it" in found["store"].said
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_makes_no_links_is_a_problem() -> None:
    found = by_name(store_findings("/proc/store"))
    assert found["writing"].status == "problem"


def test_another_layout_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text('{"id": "x", "layout": 99}')
    found = by_name(store_findings(str(tmp_path)))
    assert found.keys() == {"store"}
    assert (found["store"].status, "layout 99" in found["store"].said) == ("problem", True)


# ------------------------------------------------------------------------------------------------- S3


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    yield monkeypatch
    client.cache_clear()


def at(endpoint: str, s3: pytest.MonkeyPatch) -> None:
    s3.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    client.cache_clear()


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


def test_s3_is_well_and_the_probe_is_removed(moto: str, s3: pytest.MonkeyPatch) -> None:
    at(moto, s3)
    client().create_bucket(Bucket="bucket")
    found = by_name(store_findings("s3://bucket/prefix"))
    assert {name: finding.status for name, finding in found.items()} == WELL
    assert "the first run creates it" in found["store"].said
    assert client().list_objects_v2(Bucket="bucket")["KeyCount"] == 0
    store = open_store("s3://bucket/prefix")
    assert statuses(store_findings("s3://bucket/prefix/")) == WELL
    assert store.names("") == ["store.json"]


def test_a_bucket_that_is_not_there_and_an_address_with_keys_are_problems(
    moto: str, s3: pytest.MonkeyPatch
) -> None:
    at(moto, s3)
    found = by_name(store_findings("s3://nowhere/x"))
    assert found.keys() == {"store"}
    assert "no such bucket" in found["store"].said
    (finding,) = store_findings("s3://KEY:SECRET@bucket/x")
    assert finding.status == "problem"
    assert "SECRET" not in str(finding)


class Careless(BaseHTTPRequestHandler):
    """An S3 server that takes no notice of `If-None-Match`."""

    objects: ClassVar[dict[str, bytes]] = {}
    removes = True

    def do_PUT(self) -> None:
        self.objects[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200)

    def do_GET(self) -> None:
        if self.path in self.objects:
            self._answer(200, self.objects[self.path])
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_DELETE(self) -> None:
        if self.removes:
            self.objects.pop(self.path, None)
        self._answer(204 if self.removes else 403)

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.slow
def test_a_server_that_overwrites_is_a_problem(s3: pytest.MonkeyPatch) -> None:
    with serving(Careless) as endpoint:
        at(endpoint, s3)
        found = by_name(store_findings("s3://bucket/prefix"))
    assert {name: finding.status for name, finding in found.items()} == {"store": "ok", "writing": "problem"}
    assert "ignores If-None-Match" in found["writing"].said
    assert not Careless.objects, "the probe is removed"


def test_a_file_system_that_overwrites_is_a_problem(tmp_path: Path) -> None:
    class Overwriting(FolderStore):
        def create(self, name: str, data: bytes) -> bool:
            (self.root / name).write_bytes(data)
            return True

    tmp_path.joinpath("store.json").write_bytes(
        Path(open_store(str(tmp_path / "s")).uri, "store.json").read_bytes()
    )
    found = doctor.conditional_writes(Overwriting(tmp_path))
    assert found.status == "problem"
    assert "8 writers of one name 8 were told that they won, and a later one too" in found.said


def test_a_clock_that_differs_is_a_problem() -> None:
    found = doctor._http_clock("the S3 server", formatdate(time.time() - 3600, usegmt=True), time.time())
    assert found.status == "problem"
    (seconds,) = re.findall(r"(\d+) s ahead", found.said)
    assert 3590 < int(seconds) < 3610


@pytest.mark.slow
def test_a_probe_that_may_not_be_removed_is_told(s3: pytest.MonkeyPatch) -> None:
    class Keeping(Careless):
        removes = False
        objects: ClassVar[dict[str, bytes]] = {}

    with serving(Keeping) as endpoint:
        at(endpoint, s3)
        *_, last = store_findings("s3://bucket")
    assert (last.what, last.status) == ("writing", "warning")
    left = {path.rsplit("/", 1)[0] for path in Keeping.objects}
    assert [f"remove s3:/{path}/ by hand" in last.do for path in left] == [True]


# ------------------------------------------------------------------------------------------------- clusters


class Head(BaseHTTPRequestHandler):
    """Answers as a head of Ray does, to everyone."""

    version = "2.60.0"

    def do_GET(self) -> None:
        said = {"/api/version": {"ray_version": self.version, "session_name": "s"}, "/api/jobs/": []}
        body = json.dumps(said[self.path]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_a_cluster_without_a_token_is_told_and_where_it_listens_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda package: Head.version)
    with serving(Head) as address:
        found = by_name(cluster_findings(address, None))
        everywhere = by_name(cluster_findings(address, None, listening={"0.0.0.0", "127.0.0.1"}))
        mapped = by_name(cluster_findings(address, None, listening={"::ffff:127.0.0.1", "::1"}))
    assert {name: finding.status for name, finding in found.items()} == {
        "cluster": "ok",
        "cluster, access": "warning",
        "clock": "ok",
    }
    assert "every user of this machine can run any code" in found["cluster, access"].said
    assert everywhere["cluster, access"].status == "problem"
    assert "listens on 0.0.0.0: everyone who can reach it" in everywhere["cluster, access"].said
    assert mapped["cluster, access"] == found["cluster, access"]


def test_where_a_port_listens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ThreadingHTTPServer(("0.0.0.0", 0), Head)
    try:
        found = {
            ip for ip, port, pid in doctor._listening() if (port, pid) == (server.server_port, os.getpid())
        }
    finally:
        server.server_close()
    assert found == {"0.0.0.0"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "status"), [("2.53.0", "problem"), ("2.54.0", "warning"), ("10.1", "warning")]
)
def test_a_cluster_of_another_version(version: str, status: str) -> None:
    class Other(Head):
        pass

    Other.version = version
    with serving(Other) as address:
        found = by_name(cluster_findings(address, None))
    assert found["cluster"].status == status
    assert version in found["cluster"].said
    assert ("CVE" in found["cluster"].said) == (status == "problem")


def test_what_does_not_answer_is_a_problem_and_what_is_no_address_is_refused() -> None:
    found = by_name(cluster_findings("http://127.0.0.1:9", None))
    assert {name: finding.status for name, finding in found.items()} == {"cluster": "problem"}
    with pytest.raises(RecipeError, match="http://HOST:8265"):
        doctor.examine("nowhere", "127.0.0.1:8265", None)


def test_a_store_that_the_cluster_cannot_see_is_a_problem(tmp_path: Path) -> None:
    assert not list(doctor._seen_from("http://127.0.0.1:8265", str(tmp_path)))
    assert not list(doctor._seen_from("http://head:8265", "s3://bucket/x"))
    assert statuses(doctor._seen_from("http://head:8265", "runs")) == {"store": "problem"}


@pytest.mark.ray
def test_the_local_ray_is_well_with_its_token_and_shut_without(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines.cluster.local import hold

    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with hold() as ray:
        assert statuses(doctor._local_ray()) == {
            "local Ray": "ok",
            "local Ray, access": "ok",
            "clock": "ok",
        }
        assert (
            "refuses access without a token" in by_name(cluster_findings(ray.address, None))["cluster"].said
        )
        # as another cluster, whose processes are not known
        found = by_name(cluster_findings(ray.address, ray.token_path))
        assert (
            found["cluster, access"].said
            == "it requires a token, and listens only on this machine's loopback"
        )


# ------------------------------------------------------------------------------------------------- the machine


def test_a_container_that_is_too_small_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "cgroup_limits", lambda: (0.5, GIB))
    assert [finding.status for finding in (findings._cores(), findings._memory())] == ["warning", "problem"]
    assert "1.0 GiB" in findings._memory().said


def test_a_machine_with_a_driver_and_a_torch_for_cpus_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA H100\necho NVIDIA H100\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert findings._gpus() == ["NVIDIA H100", "NVIDIA H100"]
    monkeypatch.setattr(
        findings.sys, "executable", "/bin/false"
    )  # for a torch that sees nothing, without its import
    found = findings._accelerator(findings._gpus())
    assert found.status == "problem"
    assert "2: NVIDIA H100" in found.said


def test_deepspeeds_op_is_looked_for_where_there_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "deepspeed"
    (package / "ops" / "comm").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('it must not be imported')")
    monkeypatch.syspath_prepend(str(package.parent))
    # another test of this process may have needed it
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = findings._communication_op(has_gpu=False)
    assert found.status == "problem"
    assert "without g++ and ninja it fails" in found.said
    assert findings._communication_op(has_gpu=True).status == "ok"
    (package / "ops" / "comm" / "deepspeed_shm_comm_op.cpython-311-x86_64-linux-gnu.so").touch()
    assert findings._communication_op(has_gpu=False).status == "ok"


def test_looking_for_rays_folder_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        assert findings._socket_path().status == "ok"
        assert not list(Path(short).iterdir())
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert findings._socket_path().said.startswith("/tmp "), "another is taken"


def test_the_command_line_says_what_it_found_and_its_exit_code_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(findings, "MEMORY_NEEDED", 0)
    monkeypatch.setattr(findings, "DISK_NEEDED", 0)
    well = CliRunner().invoke(app, ["doctor", "--store", str(tmp_path / "store"), "--json"])
    found = json.loads(well.stdout)
    assert well.exit_code == 0, found
    assert {"store", "writing", "clock", "Ray", "local Ray", "GPU", "DeepSpeed", "cores", "memory"} <= {
        finding["what"] for finding in found
    }
    monkeypatch.setattr(common.console, "width", 160)
    ill = CliRunner().invoke(app, ["doctor", "--store", "/proc/store"])
    assert ill.exit_code == 1
    assert re.search(r"problem +writing", ill.stdout)
    assert "→ give this user permission to write there" in ill.stdout
