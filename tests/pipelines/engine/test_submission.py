"""What can be submitted where; the clusters themselves are in tests/end_to_end/test_clusters.py."""

import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.cluster.jobs_client import ClusterUnreachable
from pipelines.engine import submission
from pipelines.spec import RecipeError
from tests.support.paths import TINY

ELSEWHERE = "http://192.0.2.1:8265"  # an address that nobody has (RFC 5737)


def test_an_address_where_nothing_answers_is_said_within_ten_seconds(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    started = time.monotonic()
    with pytest.raises(ClusterUnreachable, match=r"no usable Ray cluster: .*192\.0\.2\.1"):
        submission.reach(ELSEWHERE, tmp_path / "token")
    assert time.monotonic() - started < 11


@pytest.mark.parametrize("address", ["auto", "head:8265", "ray://head:10001", "http://", ""])
def test_an_address_that_is_none_is_said(address: str) -> None:
    with pytest.raises(RecipeError, match="http://HOST:8265"):
        submission.reach(address, None)


@pytest.mark.parametrize(
    ("kind", "is_shared"),
    [("nfs4", True), ("ceph", True), ("fuse.sshfs", True), ("ext4", False), ("overlay", False)],
)
def test_a_folder_must_be_shared_with_the_cluster(
    kind: str, is_shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = [
        psutil._ntuples.sdiskpart("/dev/x", str(tmp_path), kind, "rw"),
        psutil._ntuples.sdiskpart("/dev/y", "/", "ext4", "rw"),
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: mounts)  # such a mount can't be made in a test
    store = str(tmp_path / "not" / "yet")
    if is_shared:
        submission.check_store(store, ELSEWHERE)
    else:
        with pytest.raises(RecipeError, match=f"is on {kind}"):
            submission.check_store(store, ELSEWHERE)


def test_what_is_refused_elsewhere_is_right_on_this_machine() -> None:
    for store in ("runs", "/tmp/runs", "s3://bucket/prefix"):
        submission.check_store(store, "http://127.0.0.1:8265")
    submission.check_store("s3://bucket/prefix", ELSEWHERE)
    with pytest.raises(RecipeError, match="relative"):
        submission.check_store("runs", ELSEWHERE)


@pytest.mark.parametrize("command", ["run", "submit"])
@pytest.mark.parametrize("refused", ["cluster", "source"])
def test_what_is_refused_makes_no_store(tmp_path: Path, command: str, refused: str) -> None:
    changes = {
        "cluster": ["--address", "http://127.0.0.1:1"],
        "source": ["--set", 'digits.source={"kind": "folder", "root": "/nowhere"}'],
    }
    done = CliRunner().invoke(app, [command, str(TINY), "--store", str(tmp_path / "s"), *changes[refused]])
    assert isinstance(done.exception, ClusterUnreachable if refused == "cluster" else RecipeError)
    assert not list(tmp_path.iterdir())
