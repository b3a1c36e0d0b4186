"""Several hosts on one machine: network namespaces on a bridge, which needs root and iproute2.

Each has an address, a name that nothing resolves, a home, and a /tmp and a /dev/shm of its own. The bridge is in a
namespace, too, so the hosts reach each other and nothing else, and this machine's network stays as it is.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.clusters import FOREIGN
from tests.support.paths import ROOT

# The process that keeps a host's namespaces: the machine's name, its folders, and the names that it can resolve.
KEEP = """
hostname "$1"; cd "$HOME"
mount -t tmpfs tmpfs /tmp; mount -t tmpfs -o size=2g tmpfs /dev/shm
mount --bind hosts /etc/hosts; mount --bind nsswitch.conf /etc/nsswitch.conf
echo ready; exec sleep infinity
"""


def missing() -> str | None:
    """What keeps hosts from being made; None if nothing does."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    needed = ("ip", "unshare", "nsenter", "mount", "hostname")
    if absent := [program for program in needed if shutil.which(program) is None]:
        return f"{', '.join(absent)} not found"
    done = subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], capture_output=True, text=True)
    return done.stderr.strip() or None


@dataclass
class Hosts:
    """Hosts 1 to `count`."""

    folder: Path
    name: str
    count: int
    keepers: dict[int, subprocess.Popen[str]] = field(default_factory=dict)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def address(self, host: int) -> str:
        return f"10.88.0.{host}"

    def home(self, host: int) -> Path:
        return self.folder / f"home-{host}"

    def start(self, host: int, *command: str | Path, **environment: str) -> subprocess.Popen[str]:
        """Start a command on a host; what it prints is a file in the host's home."""
        with (self.home(host) / f"{secrets.token_hex(3)}.log").open("w") as log:
            process = subprocess.Popen(
                self._on(host, command), env=self._environment(host, environment), stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True, text=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def run(self, host: int, *command: str | Path, **environment: str) -> str:
        """Run a command on a host, and return what it prints."""
        own = self._environment(host, environment)
        done = subprocess.run(self._on(host, command), env=own, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{command} on host {host}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def cut(self, host: int) -> None:
        """Pull a host's cable: nothing arrives, and no connection is closed."""
        ip("-n", self.name, "link", "set", f"port{host}", "down")

    def heal(self, host: int) -> None:
        ip("-n", self.name, "link", "set", f"port{host}", "up")

    def kill(self, host: int) -> None:
        """End every process of a host, as if it lost its power: it says nothing to the others."""
        self.cut(host)
        for pid in ip("netns", "pids", self._namespace(host)).split():
            if int(pid) != self.keepers[host].pid:
                os.kill(int(pid), signal.SIGKILL)

    def _namespace(self, host: int) -> str:
        return f"{self.name}-{host}"

    def _on(self, host: int, command: tuple[str | Path, ...]) -> list[str]:
        enter = ["nsenter", "--target", str(self.keepers[host].pid), "--net", "--mount", "--uts"]
        return [*enter, *map(str, command)]

    def _environment(self, host: int, more: dict[str, str]) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        own |= {"HOME": str(self.home(host)), "PYTHONPATH": str(ROOT)}
        return own | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])} | more


@contextmanager
def several_hosts(count: int) -> Iterator[Hosts]:
    """Make hosts; nothing of them is left afterwards."""
    # not in /tmp, which every host has for itself
    folder = Path(tempfile.mkdtemp(prefix="vfh-", dir="/var/tmp"))
    hosts = Hosts(folder, f"vfh{secrets.token_hex(3)}", count)
    try:
        ip("netns", "add", hosts.name)
        ip("-n", hosts.name, "link", "add", "switch", "type", "bridge")
        ip("-n", hosts.name, "link", "set", "switch", "up")
        for host in range(1, count + 1):
            _make(hosts, host)
        yield hosts
    finally:
        for name in Path("/run/netns").glob(f"{hosts.name}*"):
            for pid in ip("netns", "pids", name.name).split():
                os.kill(int(pid), signal.SIGKILL)
            ip("netns", "delete", name.name)
        for process in [*hosts.keepers.values(), *hosts.started]:
            process.communicate(timeout=10)
        shutil.rmtree(hosts.folder, ignore_errors=True)


def _make(hosts: Hosts, host: int) -> None:
    name, home = hosts._namespace(host), hosts.home(host)
    ip("netns", "add", name)
    ip("-n", hosts.name, "link", "add", f"port{host}", "type", "veth", "peer", "name", "eth0", "netns", name)
    ip("-n", hosts.name, "link", "set", f"port{host}", "master", "switch", "up")
    ip("-n", name, "link", "set", "lo", "up")
    ip("-n", name, "address", "add", f"{hosts.address(host)}/24", "dev", "eth0")
    ip("-n", name, "link", "set", "eth0", "up")
    home.mkdir()
    (home / "hosts").write_text("127.0.0.1 localhost\n")
    (home / "nsswitch.conf").write_text("passwd: files\nhosts: files\n")
    keep = [*f"ip netns exec {name} unshare --mount --uts bash -ec".split(), KEEP, "bash", f"host{host}"]
    environment = os.environ | {"HOME": str(home)}
    hosts.keepers[host] = subprocess.Popen(keep, env=environment, stdout=subprocess.PIPE, text=True)
    assert (said := hosts.keepers[host].stdout) is not None and said.readline() == "ready\n"


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
