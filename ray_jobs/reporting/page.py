"""The page: one self-contained HTML file.

In: `ReportData`. Out: HTML as text. The template is page.html.j2. Class names and titles are untrusted, so everything
is escaped.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ray_jobs.evaluation.metrics import COMPUTED
from ray_jobs.reporting.gather import ReportData
from ray_jobs.reporting.verdicts import CONCLUSIONS, labels_text, percent, points, sort_of_learning

TEMPLATE = Path(__file__).with_suffix(".html.j2")


def render(data: ReportData) -> str:
    """Render the page; the same data give the same text."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    filters = (percent, points, duration, number, day, mebibytes, setting)
    environment.filters |= {function.__name__: function for function in filters}
    return environment.get_template(TEMPLATE.name).render(
        **data.numbers,
        groups=groups(data.numbers["accuracies"]),
        other_groups=other_groups(data.numbers.get("other_metrics", [])),
        figures=data.figures,
        sheets=data.sheets,
        images=data.images,
        scale=scale(data.numbers["accuracies"]),
        conclusions=CONCLUSIONS,
        cost_figures=[f"cost {group['task']}" for group in data.numbers["costs"]],
        metrics=COMPUTED,
        measured_on=measured_on(data.numbers["costs"]),
    )


def groups(accuracies: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Group comparable lines of the table under headings: the best first, lines that cover only a part of test last."""
    grouped = groupby(
        accuracies, lambda line: f"{line['task']}, {sort_of_learning(line['protocol'])}, {line['labels']}"
    )
    return [
        (name, sorted(lines, key=lambda line: (line["apart"], -line["accuracy"]))) for name, lines in grouped
    ]


def other_groups(metrics: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Group the lines of metrics other than accuracy under headings, in their order."""

    def heading(line: dict[str, Any]) -> str:
        shots = line["labels_per_class"]
        few = [] if shots is None else [labels_text(shots, None)]
        return ", ".join([line["task"], line["protocol"], *few])

    return [(name, list(lines)) for name, lines in groupby(metrics, heading)]


def scale(accuracies: list[dict[str, Any]]) -> float:
    """Return where the table's bars begin (they end at 1): a round tenth below the lowest interval, at most 0.9."""
    lowest = min((line["low"] for line in accuracies), default=0.0)
    return min(0.9, max(0.0, int(lowest * 10) / 10))


def measured_on(costs: list[dict[str, Any]]) -> list[str]:
    """Describe each way in which costs were measured: 'forward: 32 images in float32, on AMD EPYC with 1 thread'."""
    ways = [
        f"{name}: {speed['images']} images in {speed['dtype']}, on {line['device']}"
        + (f" with {threads} thread{'s' * (threads > 1)}" if (threads := line["threads"]) else "")
        for group in costs
        for line in group["lines"]
        for name in ("forward", "training")
        if (speed := line[name])
    ]
    return list(dict.fromkeys(ways))


def mebibytes(speed: dict[str, Any]) -> str:
    """Return the peak memory in MiB; a dash if it is unknown."""
    return "–" if speed["peak_bytes"] is None else f"{speed['peak_bytes'] / 2**20:,.0f}"


def setting(value: Any) -> str:
    """Return a recorded value with all its digits, in words: 'no', '1,000', '0.1, 0.01', 'low 0.1, high 1.0'."""
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case dict():
            fields = ((name.replace("_", " "), inner) for name, inner in value.items())
            return ", ".join(
                f"{name} ({setting(inner)})"
                if isinstance(inner, dict | list | tuple)
                else f"{name} {setting(inner)}"
                for name, inner in fields
            )
        case list() | tuple():
            return ", ".join(map(setting, value)) or "none"
    return str(value)


def duration(seconds: float) -> str:
    """Return '4.2 s', or '0:03:12' for a minute or more."""
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def number(value: float | int | str) -> str:
    """Return '206,986', '5,812' or '0.874': as many digits as a reader needs."""
    if isinstance(value, str | bool):
        return str(value).lower() if isinstance(value, bool) else value
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"


def day(time: str) -> str:
    """Return an ISO time as '2026-11-21 08:30 UTC'."""
    return f"{datetime.fromisoformat(time):%Y-%m-%d %H:%M} UTC"
