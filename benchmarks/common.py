"""Shared by the benchmarks: packages of peers, the setting of a measurement, the pages of results."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from ray_jobs.process.stage import processor

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def install(folder: Path, *requirements: str, check: bool = True) -> None:
    """Install packages from PyPI into a separate folder, without dependencies, which could replace ours."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*command, *requirements], check=check)


def setting(load: float) -> str:
    """Return date, machine and load, for the head of a page.

    Args:
        load: the load average when the benchmark started.
    """
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, {processor()}, "
        f"load before: {load:.1f}, after: {os.getloadavg()[0]:.1f}"
    )


def spread(values: Sequence[float]) -> str:
    """Return median and range, as a cell of a table."""
    return f"{statistics.median(values):,.0f} ({min(values):,.0f}-{max(values):,.0f})"


def values(rows: Iterable[tuple[str, float, str]]) -> list[str]:
    """Return a table of measurements and targets, in seconds unless the name says otherwise."""
    lines = ["| measured | value | target |", "|---|---:|---|"]
    for name, value, target in rows:
        unit = "" if "images/s" in name else " s"
        lines.append(f"| {name} | {value:,.2f}{unit} | {target} |")
    return lines


def keep(page: str, lines: Iterable[str], *, is_written: bool = True) -> None:
    """Print a page of results and write it to benchmarks/results/."""
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if is_written:
        (RESULTS / page).write_text(text, encoding="utf-8")
