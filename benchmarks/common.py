"""Shared by the benchmarks: packages of peers, vitflow in a scratch folder, the setting, the pages of results."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = {"image_size": 8, "in_channels": 1, "patch_size": 2, "width": 64, "depth": 4, "num_heads": 4}
"""The quickstart's ViT, apart from its classes."""
RESULTS = ROOT / "benchmarks" / "results"
sys.path.append(str(ROOT))  # for the tests' package


def install(folder: Path, *requirements: str, check: bool = True) -> None:
    """Install packages from PyPI into a separate folder, without dependencies, which could replace ours."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*command, *requirements], check=check)


def keep_ray_below(folder: Path, idle_seconds: int = 120) -> None:
    """Let this process and its children use a local Ray, and a cache, of their own."""
    os.environ.update(
        VITFLOW_RAY_DIR=str(folder / "ray"),
        XDG_CACHE_HOME=str(folder / "cache"),
        VITFLOW_RAY_IDLE_SECONDS=str(idle_seconds),
    )


def vitflow(*words: str, store: Path | str) -> str:
    """Run a command of vitflow; return what it writes to stdout."""
    command = [sys.executable, "-m", "pipelines", *words, "--store", str(store)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def query(store: Path, sql: str) -> list[dict[str, Any]]:
    """Return the rows of a query."""
    rows: list[dict[str, Any]] = json.loads(vitflow("report", "query", sql, "--json", store=store))
    return rows


def setting(load: float) -> str:
    """Return date, machine and load, for the head of a page.

    Args:
        load: the load average when the benchmark started.
    """
    from ray_jobs.process.stage import processor  # some benchmarks need torch and pydantic only

    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, {processor()}, "
        f"load before: {load:.1f}, after: {os.getloadavg()[0]:.1f}"
    )


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Return median and range, as a cell of a table."""
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"


def values(rows: Iterable[tuple[str, float, str]]) -> list[str]:
    """Return a table of seconds and targets."""
    lines = ["| measured | value | target |", "|---|---:|---|"]
    for name, value, target in rows:
        lines.append(f"| {name} | {value:,.2f} s | {target} |")
    return lines


def keep(page: str, lines: Iterable[str], *, is_written: bool = True) -> None:
    """Print a page of results and write it to benchmarks/results/."""
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if is_written:
        (RESULTS / page).write_text(text, encoding="utf-8")
