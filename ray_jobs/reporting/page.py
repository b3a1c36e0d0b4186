"""The page: one HTML file with everything in it.

In: `ReportData`. Out: HTML as text. The template is page.html.j2; class names and titles come
from outside, so everything is escaped but the plots, whose text matplotlib has escaped.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ray_jobs.reporting.gather import ReportData
from ray_jobs.reporting.verdicts import percent, points, sort_of_learning

TEMPLATE = Path(__file__).with_suffix(".html.j2")


def render(data: ReportData) -> str:
    """The whole page; the same data give the same text."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {
        "percent": percent,
        "points": points,
        "duration": duration,
        "number": number,
        "day": day,
    }
    return environment.get_template(TEMPLATE.name).render(
        **data.numbers,
        groups=groups(data.numbers["accuracies"]),
        figures={name: Markup(svg) for name, svg in data.figures.items()},  # noqa: S704 - made by matplotlib, text escaped
        sheets=data.sheets,
        images=data.images,
        scale=scale(data.numbers["accuracies"]),
    )


def groups(accuracies: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """The lines of the table under their headings: comparable ones together, best first. Lines of a part of test come
    last."""

    def heading(line: dict[str, Any]) -> str:
        return f"{line['task']}, {sort_of_learning(line['protocol'])}, {line['labels']}"

    found = [(name, list(lines)) for name, lines in groupby(accuracies, heading)]
    return [
        (name, sorted(lines, key=lambda line: (line["apart"], -line["accuracy"]))) for name, lines in found
    ]


def scale(accuracies: list[dict[str, Any]]) -> float:
    """Where the bars of the table begin (they end at 1): a round tenth under the lowest interval, 0.9 at most."""
    lowest = min((line["low"] for line in accuracies), default=0.0)
    return min(0.9, max(0.0, int(lowest * 10) / 10))


def duration(seconds: float) -> str:
    """'4.2 s', or '0:03:12' from a minute on."""
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def number(value: float | int | str) -> str:
    """'206,986', '5,812', '0.874': as many digits as a reader needs."""
    if isinstance(value, str | bool):
        return str(value).lower() if isinstance(value, bool) else value
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"


def day(time: str) -> str:
    """'2026-11-21 08:30 UTC' of an ISO time."""
    return f"{datetime.fromisoformat(time):%Y-%m-%d %H:%M} UTC"
