"""Several hosts on one machine: network namespaces on a bridge, which needs root and iproute2.

Each has an address, a name that nothing resolves, a home, and a /tmp and a /dev/shm of its own. The bridge is in a
namespace, too, so the hosts reach each other and nothing else, and this machine's network stays as it is.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import secrets
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
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

TUNNEL = struct.pack("16xH22x", 0x0001 | 0x1000)  # an ifreq: a device for IP packets, without a header of its own
SET_INTERFACE = 0x400454CA


def missing() -> str | None:
    """What keeps hosts from being made; None if nothing does."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    needed = ("ip", "unshare", "nsenter", "mount", "hostname")
    if absent := [program for program in needed if shutil.which(program) is None]:
        return f"{', '.join(absent)} not found"
    done = subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], capture_output=True, text=True)
    return done.stderr.strip() or None


@dataclass(frozen=True)
class Fault:
    """What a link does to packets: the shares that it loses in each direction, and by how much it delays the others."""

    there: float
    back: float
    seconds: float = 0.0


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
        for pid in self.pids(host):
            if pid != self.keepers[host].pid:
                os.kill(pid, signal.SIGKILL)

    def pids(self, host: int) -> list[int]:
        """Return the processes of a host."""
        return [int(pid) for pid in ip("netns", "pids", self._namespace(host)).split()]

    @contextmanager
    def broken(self, one: int, other: int, fault: Fault) -> Iterator[None]:
        """Break the link between two hosts during the block; their other links, and open connections, stay."""
        ends = (self._tunnel(one, other), self._tunnel(other, one))
        over = threading.Event()
        relay = threading.Thread(target=_relay, args=(ends, fault, over), name="relay")
        relay.start()
        try:
            yield
        finally:
            over.set()
            relay.join()
            for end in ends:
                os.close(end)  # the device vanishes, and with it the route

    def _tunnel(self, host: int, other: int) -> int:
        """Route a host's packets to another into a file that is returned."""
        end = os.open("/dev/net/tun", os.O_RDWR)
        name = fcntl.ioctl(end, SET_INTERFACE, TUNNEL)[:16].rstrip(b"\0").decode()
        namespace = self._namespace(host)
        ip("link", "set", name, "netns", namespace)
        ip("-n", namespace, "link", "set", name, "up")
        ip("-n", namespace, "route", "add", self.address(other), "dev", name, "src", self.address(host))
        return end

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


def _relay(ends: tuple[int, int], fault: Fault, over: threading.Event) -> None:
    """Carry packets from each end to the other; this kernel's own means (netem) are not everywhere."""
    queue: list[tuple[float, int, int, bytes]] = []
    number = 0
    while not over.is_set():
        wait = min(0.2, max(0.0, queue[0][0] - time.monotonic())) if queue else 0.2
        for end in select.select(ends, [], [], wait)[0]:
            packet, number = os.read(end, 65536), number + 1
            to, lost = (ends[1], fault.there) if end == ends[0] else (ends[0], fault.back)
            if random.random() >= lost:
                heapq.heappush(queue, (time.monotonic() + fault.seconds, number, to, packet))
        while queue and queue[0][0] <= time.monotonic():
            os.write(queue[0][2], heapq.heappop(queue)[3])


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
