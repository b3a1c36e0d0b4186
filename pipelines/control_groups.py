"""What the control groups of this process (a container's, a batch system's) allow it to use."""

from __future__ import annotations

from pathlib import Path


def cgroup_limits(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> tuple[float | None, int | None]:
    """Return (cores, bytes of memory) that this process's control groups, version 1 or 2, allow; None: no limit."""
    cores: list[float] = []
    memory: list[int] = []
    for line in (text_of(membership) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):  # "" in version 2, which has one tree, at the root itself
            tree = root / controller
            group = tree / path.lstrip("/")
            for folder in (group, *group.parents):  # a limit holds for all groups below it
                if not folder.is_relative_to(tree):
                    break
                quota = (text_of(folder / "cpu.max") or "").split()
                quota = quota or [
                    text_of(folder / f"cpu.cfs_{name}_us") or "max" for name in ("quota", "period")
                ]
                if quota[0].isdigit() and quota[1].isdigit():  # else "max", or -1
                    cores.append(int(quota[0]) / int(quota[1]))
                limits = (text_of(folder / name) or "max" for name in ("memory.max", "memory.limit_in_bytes"))
                memory += [int(limit) for limit in limits if limit.isdigit()]
    return min(cores, default=None), min(memory, default=None)


def text_of(path: Path) -> str | None:
    """Return a small file's text without surrounding space; None if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
