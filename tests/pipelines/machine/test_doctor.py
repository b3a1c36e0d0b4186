"""What is broken is found, what is well is not complained of, and looking leaves nothing behind."""

import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from typer.testing import CliRunner
from werkzeug import Response

from pipelines.cli import app
from pipelines.commands import common
from pipelines.machine import doctor, findings
from pipelines.machine.doctor import cluster_findings, store_findings
from pipelines.machine.findings import GIB, Finding
from pipelines.spec import RecipeError
from pipelines.store import open_store
from tests.support.s3 import Server, used
from tests.support.serving import serving


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    found = list(findings)
    assert all(finding.text and bool(finding.do) == (finding.status != "ok") for finding in found)
    return {finding.what: finding for finding in found}


def statuses(findings: Iterable[Finding]) -> dict[str, str]:
    return {name: finding.status for name, finding in by_name(findings).items()}


# ------------------------------------------------------------------------------------------------- a folder

WELL = {"store": "ok", "writing": "ok"}


def everything_in(folder: Path) -> set[Path]:
    return {Path(parent) / name for parent, _, names in os.walk(folder) for name in [*names, "."]}


def test_a_folder_is_well_and_left_as_it_was(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    before = everything_in(tmp_path)
    assert statuses(store_findings(store.uri)) == WELL
    assert everything_in(tmp_path) == before


def test_a_store_that_is_not_there_yet_is_well_and_not_made(tmp_path: Path) -> None:
    found = by_name(store_findings(str(tmp_path / "a" / "b")))
    assert {name: finding.status for name, finding in found.items()} == WELL
    assert "the first run creates it" in found["store"].text
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_makes_no_links_is_a_problem() -> None:
    found = by_name(store_findings("/proc/store"))
    assert found["writing"].status == "problem"


def test_another_layout_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text('{"id": "x", "layout": 99}')
    found = by_name(store_findings(str(tmp_path)))
    assert found.keys() == {"store"}
    assert (found["store"].status, "layout 99" in found["store"].text) == ("problem", True)


# ------------------------------------------------------------------------------------------------- S3


def test_s3_is_well_and_left_as_it_was(moto: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = moto.bucket()
    uri = f"s3://{bucket.name}/prefix"
    with used(moto, monkeypatch):
        found = by_name(store_findings(uri))
        assert "the first run creates it" in found["store"].text
        assert bucket.objects() == {}
        store = open_store(uri)
        assert statuses(store_findings(f"{uri}/")) == {"store": "ok"}
        assert store.names("") == ["store.json"]


def test_a_bucket_that_is_not_there_and_an_address_with_keys_are_problems(
    moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with used(moto, monkeypatch):
        found = by_name(store_findings("s3://nowhere/x"))
        (finding,) = store_findings("s3://KEY:SECRET@bucket/x")
    assert found.keys() == {"store"}
    assert "no such bucket" in found["store"].text
    assert finding.status == "problem"
    assert "SECRET" not in str(finding)


# ------------------------------------------------------------------------------------------------- clusters


def head(version: str = "2.60.0") -> AbstractContextManager[str]:
    """The address of a server that answers as a head of Ray does, to everyone."""
    said = {"/api/version": {"ray_version": version, "session_name": "s"}, "/api/jobs/": []}
    return serving(lambda environ, start: Response(json.dumps(said[environ["PATH_INFO"]]))(environ, start))


def test_a_cluster_without_a_token_is_told_and_where_it_listens_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda package: "2.60.0")
    with head() as address:
        found = by_name(cluster_findings(address, None))
        everywhere = by_name(cluster_findings(address, None, listening={"0.0.0.0", "127.0.0.1"}))
        mapped = by_name(cluster_findings(address, None, listening={"::ffff:127.0.0.1", "::1"}))
    assert {name: finding.status for name, finding in found.items()} == {"cluster": "ok", "cluster, access": "warning"}
    assert "every user of this machine can run any code" in found["cluster, access"].text
    assert everywhere["cluster, access"].status == "problem"
    assert "listens on 0.0.0.0: everyone who can reach it" in everywhere["cluster, access"].text
    assert mapped["cluster, access"] == found["cluster, access"]


def test_where_a_port_listens_is_seen() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        own = (server.getsockname()[1], os.getpid())
        assert {ip for ip, *at in doctor._listening() if tuple(at) == own} == {"0.0.0.0"}


def test_a_cluster_of_another_version_is_told() -> None:
    with head("2.61.7") as address:
        found = by_name(cluster_findings(address, None))["cluster"]
    assert (found.status, "2.61.7" in found.text) == ("warning", True)


def test_what_does_not_answer_is_a_problem_and_what_is_no_address_is_refused() -> None:
    assert statuses(cluster_findings("http://127.0.0.1:9", None)) == {"cluster": "problem"}
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
        assert statuses(doctor._local_ray()) == {"local Ray": "ok", "local Ray, access": "ok"}
        assert "refuses access without a token" in by_name(cluster_findings(ray.address, None))["cluster"].text
        # as another cluster, whose processes are not known
        found = by_name(cluster_findings(ray.address, ray.token_path))
        assert "requires a token" in found["cluster, access"].text


# ------------------------------------------------------------------------------------------------- the machine


def test_a_container_that_is_too_small_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "cgroup_limits", lambda: (0.5, GIB))
    assert [finding.status for finding in (findings._cores(), findings._memory())] == ["warning", "problem"]
    assert "1.0 GiB" in findings._memory().text


def test_a_machine_with_a_driver_and_a_torch_for_cpus_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA H100\necho NVIDIA H100\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert findings._gpus() == ["NVIDIA H100", "NVIDIA H100"]
    # for a torch that sees nothing, without its import
    monkeypatch.setattr(findings.sys, "executable", "/bin/false")
    found = findings._accelerator(findings._gpus())
    assert found.status == "problem"
    assert "2: NVIDIA H100" in found.text


def test_deepspeeds_op_is_looked_for_where_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "deepspeed"
    (package / "ops" / "comm").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('it must not be imported')")
    monkeypatch.syspath_prepend(str(package.parent))
    # another test of this process may have needed it
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = findings._communication_op(has_gpu=False)
    assert found.status == "problem"
    assert "without g++ and ninja it fails" in found.text
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
    assert findings._socket_path().text.startswith("/tmp "), "another is taken"


def test_the_command_line_says_what_it_found_and_its_exit_code_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(findings, "MEMORY_NEEDED", 0)
    monkeypatch.setattr(findings, "DISK_NEEDED", 0)
    well = CliRunner().invoke(app, ["doctor", "--store", str(tmp_path / "store"), "--json"])
    found = json.loads(well.stdout)
    assert well.exit_code == 0, found
    assert {"store", "writing", "local Ray", "GPU", "DeepSpeed", "cores", "memory"} <= {
        finding["what"] for finding in found
    }
    monkeypatch.setattr(common.console, "width", 160)
    ill = CliRunner().invoke(app, ["doctor", "--store", "/proc/store"])
    assert ill.exit_code == 1
    assert re.search(r"problem +writing", ill.stdout)
    assert "→ give this user permission to write there" in ill.stdout
