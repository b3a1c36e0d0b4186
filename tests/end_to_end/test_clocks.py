"""Machines whose clocks differ: the driver, the cluster's head and its worker; S3 refuses clocks that are far off."""

import os
import shutil
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.clusters import home, ray_cluster
from tests.support.paths import ROOT, TINY
from tests.support.s3 import Server
from tests.support.stores import manifests, repeated

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.timeout(1500),
    pytest.mark.skipif("VITFLOW_HOSTS" not in os.environ, reason="twelve minutes; `make test-hosts`"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler"),
]
HOUR, TOLERATED, REFUSED = 3600, 600, 960  # seconds; S3 tolerates 15 minutes


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that makes a process's clock wrong."""
    path = tmp_path_factory.mktemp("clock") / "wrong_clock.so"
    source = ROOT / "tests" / "support" / "wrong_clock.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, source, "-ldl"], check=True)
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Stage -> manifest, made where all clocks are right."""
    store = tmp_path_factory.mktemp("undisturbed") / "store"
    status, said = run({**os.environ}, "--store", store)
    assert status == 0, said
    return manifests(store)


def wrong(library: Path, seconds: int) -> dict[str, str]:
    """The environment of a machine whose clock is wrong by so much."""
    return {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(seconds)}


def run(environment: dict[str, str], *arguments: str | Path) -> tuple[int, str]:
    """The status of `vitflow run`, and what it prints."""
    command = [sys.executable, "-m", "pipelines", "run", TINY, "--only", "pretrain", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(("seconds", "server"), [(HOUR, None), (TOLERATED, "ceph")])
def test_clocks_that_differ_change_nothing(
    seconds: int,
    server: str | None,
    library: Path,
    undisturbed: dict[str, dict[str, Any]],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """The driver is ahead, the worker is behind, the head is right."""
    store, keys, read = str(tmp_path / "store"), dict[str, str](), partial(manifests, tmp_path / "store")
    if server is not None:
        running: Server = request.getfixturevalue(server)
        bucket = running.bucket()
        store, keys, read = f"s3://{bucket.name}/store", running.environment, bucket.manifests
    with ray_cluster([0, 1], keys, keys | wrong(library, -seconds)) as cluster:
        at = ("--store", store, "--address", cluster.address, "--token-file", cluster.token)
        status, said = run(home(tmp_path / "ahead", **keys) | wrong(library, seconds), *at)
        assert status == 0 and "another attempt" not in said and "warning" not in said, said
        status, again = run(home(tmp_path / "right", **keys), *at)
        assert status == 0 and again.count("CACHED") == 2, again
    made = read()
    assert made.keys() == {"digits", "pretrain"}
    for stage, manifest in made.items():
        assert manifest["attempt"] == 1
        assert repeated(manifest["files"]) == repeated(undisturbed[stage]["files"])


def test_s3_refuses_a_clock_that_is_far_off_and_one_sentence_says_whose(
    library: Path, ceph: Server, tmp_path: Path
) -> None:
    store = f"s3://{ceph.bucket().name}/store"
    keys = ceph.environment
    sentence = f"the clock of {socket.gethostname()} differs too much from the server's; correct it"
    with ray_cluster([1], keys | wrong(library, REFUSED)) as cluster:
        at = ("--store", store, "--address", cluster.address, "--token-file", cluster.token)
        status, said = run(home(tmp_path / "ahead", **keys) | wrong(library, REFUSED), *at)
        assert status == 2 and "\n" not in said.strip() and sentence in said, said
        status, said = run(home(tmp_path / "right", **keys), *at)
        assert status == 1 and "FAILED" in said and sentence in said and "another attempt" not in said, said
