"""Every process of pytest has a home of its own, and one real Ray for the tests marked `ray`, gone when they are done.

Libraries that only some tests compare with (scikit-learn, scipy's parts, timm, transformers, moto) are imported inside
those tests: every process of pytest-xdist collects every file, and transformers' models alone take 3 s to import.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

from pipelines.store import Store, open_store
from tests.support import in_process
from tests.support.paths import TINY
from tests.support.s3 import ceph, moto  # noqa: F401 (fixtures)

# How long an example takes is this machine's business, not a property.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

Vitflow = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store in a folder."""
    return open_store(str(tmp_path / "store"))


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Mark tests that use an S3 server as slow: starting one takes longer than most tests."""
    for item in items:
        names = {*item.fixturenames, item.callspec.params.get("place") if hasattr(item, "callspec") else None}
        if names & {"moto", "ceph"}:
            item.add_marker("slow")


@pytest.fixture(scope="session", autouse=True)
def home() -> Iterator[Path]:
    """An empty home for the whole session: no test sees or leaves anything in the user's own."""
    # short: paths of Ray's sockets in it must stay below 108 bytes
    folder = Path(tempfile.mkdtemp(prefix="vft-"))
    patch = pytest.MonkeyPatch()
    for name in (
        "RAY_ADDRESS",
        "RAY_API_SERVER_ADDRESS",
        "RAY_AUTH_MODE",
        "RAY_AUTH_TOKEN_PATH",
        "VITFLOW_STORE",
    ):
        patch.delenv(name, raising=False)
    patch.setenv("HOME", str(folder))
    patch.setenv("XDG_CACHE_HOME", str(folder / ".cache"))
    patch.setenv("VITFLOW_RAY_DIR", str(folder / "ray"))
    patch.setenv("VITFLOW_RAY_IDLE_SECONDS", "600")  # it is shut down below
    patch.setenv("COLUMNS", "160")
    yield folder
    if (folder / "ray").exists():
        from pipelines.cluster.local import shut_down

        assert shut_down(), "a test left somebody who uses the local Ray"
    patch.undo()
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def vitflow() -> Vitflow:
    """Run the command line in a process of its own; `check` is the exit code that is expected."""

    def run(*arguments: str | Path, check: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "pipelines", *map(str, arguments)],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == check, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture(scope="session")
def tiny_store(vitflow: Vitflow, tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A store with one undisturbed run of the tiny pipeline. Tests that write to a store copy it first.

    The processes of pytest-xdist share it: the first that needs it makes it.
    """
    own = tmp_path_factory.getbasetemp()
    shared = (own if worker_id == "master" else own.parent) / "tiny-store"
    with FileLock(f"{shared}.lock"):
        if not shared.exists():
            store = tmp_path_factory.mktemp("tiny") / "store"
            assert "report.html" in vitflow("run", TINY, "--store", store).stdout
            store.rename(shared)
    return shared


@pytest.fixture(scope="session")
def vitflow_here() -> Vitflow:
    """Run the command line in this process, half a second faster."""
    return in_process.vitflow


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A Ray in this process, for stages that are called and not submitted: two cores, whatever the machine has."""
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def vitflow_local(local_ray: None) -> Vitflow:
    """Run the command line and its jobs in this process."""
    return partial(in_process.vitflow, jobs=in_process.Jobs())
