"""A run on a machine with other Rays on it: it finds its own, and nothing of it can be reached from outside."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from ipaddress import IPv6Address, ip_address
from pathlib import Path

import psutil
import pytest

from tests.support.clusters import FOREIGN, ray_cluster
from tests.support.paths import TINY

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]


@pytest.fixture
def home() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="vfo-"))
    yield folder
    deadline = time.monotonic() + 60
    while (folder / "ray" / "head.json").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    shutil.rmtree(folder)


def listening(environment: dict[str, str]) -> set[tuple[str, str]]:
    """(name, address) of every process of this home that listens."""
    found = set()
    for process in psutil.process_iter():
        try:
            # Ray's titles overwrite a worker's environment: such a one is known by its parent
            near = [process, *process.parents()]
            if any(each.environ().get("HOME") == environment["HOME"] for each in near):
                sockets = process.net_connections("inet")
                found |= {(process.name(), each.laddr.ip) for each in sockets if each.status == "LISTEN"}
        except psutil.Error:
            continue
    return found


def is_loopback(address: str) -> bool:
    found = ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return (mapped or found).is_loopback


def test_two_workers_train_beside_another_ray_and_listen_on_loopback_only(home: Path, tmp_path: Path) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    environment = own | {
        "HOME": str(home),
        "VITFLOW_RAY_DIR": str(home / "ray"),
        "VITFLOW_RAY_IDLE_SECONDS": "1",
    }
    command = ["-m", "pipelines", "run", TINY, "--only", "pretrain", "--store", tmp_path / "s"]
    seen: set[tuple[str, str]] = set()
    with ray_cluster([1]), (tmp_path / "said").open("wb") as said:
        run = subprocess.Popen(
            [sys.executable, *map(str, command)], env=environment, stdout=said, stderr=said
        )
        while run.poll() is None:
            seen |= listening(environment)
            time.sleep(0.1)
    text = (tmp_path / "said").read_text()
    assert run.returncode == 0, text
    assert "multiple active Ray instances" not in text
    assert "Exception in thread" not in text
    assert any(name.startswith("ray::RayTrainWorker") for name, _ in seen), (
        "it was looked at while it trained"
    )
    assert {(name, address) for name, address in seen if not is_loopback(address)} == set()
