"""Limits of control groups, of both versions, in files written here."""

from pathlib import Path

import pytest

from pipelines.machine.findings import cgroup_limits


@pytest.mark.parametrize(
    ("membership", "files", "limits"),
    [
        (
            "0::/a/b\n",
            {"a/b/cpu.max": "max 1000", "a/cpu.max": "1500 1000", "a/b/memory.max": "max"},
            (1.5, None),
        ),
        ("0::/a\n", {"a/memory.max": "3000", "memory.max": "2000", "cpu.max": "50000 100000"}, (0.5, 2000)),
        (
            "4:memory:/x/y\n1:cpu,cpuacct:/x\n0::/\n",
            {
                "memory/x/y/memory.limit_in_bytes": "9223372036854771712",
                "memory/x/memory.limit_in_bytes": "5000",
                "cpu/x/cpu.cfs_quota_us": "400000",
                "cpu/x/cpu.cfs_period_us": "100000",
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
            },
            (4.0, 5000),
        ),
        ("", {}, (None, None)),
    ],
)
def test_limits_of_control_groups(
    tmp_path: Path, membership: str, files: dict[str, str], limits: tuple[float | None, int | None]
) -> None:
    (tmp_path / "self").write_text(membership)
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert cgroup_limits(tmp_path / "self", tmp_path / "cgroup") == limits
