"""The tables, as lines of Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from common import spread

from loading import gates
from loading.arms import ARMS
from loading.data import SETS

HEAD = "| loader | workers | images/s, median (range) | of the floor | CPU s per 1,000 images | MiB | first batch, s |"


class Measured(NamedTuple):
    """The rounds of an arm with its best number of workers, or why there are none."""

    workers: int
    rounds: list[dict[str, float]]
    error: str


def rates(name: str, cores: int, measured: Mapping[str, Measured]) -> list[str]:
    """Return the table of a set on `cores` cores, a row per arm."""
    lines = [f"## {name} ({SETS[name]}), {cores} core{'s' * (cores > 1)}", "", HEAD, "|---|" + "---:|" * 6]
    floor = measured["floor"].rounds if "floor" in measured else []
    for arm, (workers, rounds, error) in measured.items():
        if not rounds:
            lines.append(f"| {ARMS[arm].title} | left out: {error} | | | | | |")
            continue
        median = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        # The same rounds are compared: a busy machine slows both sides.
        shares = [own["rate"] / best["rate"] for own, best in zip(rounds, floor, strict=False)]
        cells = [
            str(workers),
            spread([each["rate"] for each in rounds]),
            f"{statistics.median(shares):.0%}" if shares else "-",
            f"{median['cpu']:.3g}",
            f"{median['memory']:,.0f}",
            f"{median['first']:.2f}",
        ]
        lines.append(f"| {ARMS[arm].title} | {' | '.join(cells)} |")
    return [*lines, ""]


def correctness(found: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return the table of correctness, from the results of the gates by arm."""
    columns = gates.COLUMNS
    lines = ["## Correctness", "", f"| loader | {' | '.join(columns.values())} |", "|---" * 7 + "|"]
    for arm, own in found.items():
        otherwise = f"failed: {own['error']}" if "error" in own else "not tried"
        cells = [str(own.get(column, otherwise)) for column in columns]
        lines.append(f"| {ARMS[arm].title} | {' | '.join(cells)} |")
    return [*lines, ""]
