"""The page: one self-contained HTML file.

In: `ReportData`. Out: HTML as text. The template is page.html.j2, with a part for each section. Class names and titles
are untrusted, so everything is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipelines.spec import quantity
from ray_jobs.evaluation.metrics import COMPUTED
from ray_jobs.reporting.answer import study_of
from ray_jobs.reporting.drawing import plots
from ray_jobs.reporting.drawing.svg import Scale, spread
from ray_jobs.reporting.first_screen import SHOWN, first_screen
from ray_jobs.reporting.gather import ReportData
from ray_jobs.reporting.studies import best
from ray_jobs.reporting.verdicts import labels_text, percent, points, quoted, sort_of_learning

TEMPLATE = Path(__file__).with_suffix(".html.j2")


def render(data: ReportData) -> str:
    """Render the page; the same data give the same text."""
    numbers = data.numbers
    screen = first_screen(numbers)
    return (
        templates()
        .get_template(TEMPLATE.name)
        .render(
            **numbers,
            screen=screen,
            shown=0 if numbers["vtab"] or study_of(numbers) else SHOWN,
            has_curves=has_curves(data),
            sections=sections(data),
            plots=plots,
            axes=axes(numbers["accuracies"], screen["compared"]),
            groups=groups(numbers["accuracies"]),
            other_groups=other_groups(numbers.get("other_metrics", [])),
            figures=data.figures,
            sheets=data.sheets,
            images=data.images,
            looked=data.looked,
            inside=data.inside,
            detected=data.detected,
            metrics=COMPUTED,
            measured_on=measured_on(numbers["costs"]),
            best=best,
        )
    )


def templates() -> Environment:
    """Return the page's template and its parts; an unknown name in one is an error."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    filters = (percent, points, quantity, duration, number, day, mebibytes, setting, quoted, metric)
    environment.filters |= {function.__name__: function for function in filters}
    return environment


def groups(accuracies: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Group comparable lines of the table under headings: the best first, lines that cover only a part of test last."""
    grouped = groupby(
        accuracies, lambda line: f"{line['task']}, {sort_of_learning(line['protocol'])}, {line['labels']}"
    )
    return [(name, sorted(lines, key=lambda line: (line["apart"], -line["accuracy"]))) for name, lines in grouped]


def other_groups(metrics: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Group comparable lines of metrics other than accuracy under headings, the best of each group first."""

    def setting(line: dict[str, Any]) -> tuple[str, str, int, str]:
        learning = sort_of_learning(line["protocol"])
        return line["task"], learning, line["labels_per_class"] or 0, line["metric"]

    ordered = sorted(metrics, key=lambda line: (*setting(line), line["apart"], -line["value"]))
    return [
        (", ".join([task, learning, *([labels_text(shots, None)] if shots else []), metric]), list(lines))
        for (task, learning, shots, metric), lines in groupby(ordered, setting)
    ]


def has_curves(data: ReportData) -> bool:
    """Return whether there is a plot of few-shot accuracy, of a training or of a sweep."""
    return any(name.startswith(("few-shot ", "loss ", "search ")) for name in data.figures)


def sections(data: ReportData) -> list[tuple[str, str]]:
    """Return (id, name) of the page's sections."""
    numbers = data.numbers
    is_there = {
        ("answer", "Answer"): True,
        ("groups", "Groups"): numbers.get("embeddings"),
        ("vtab", "VTAB-1k"): numbers["vtab"],
        ("studies", "By setting"): numbers.get("studies"),
        ("cost", "Accuracy and cost"): numbers["costs"],
        ("accuracy", "Test accuracy"): numbers["accuracies"],
        ("accuracy", "Metrics on test"): "other_metrics" in numbers and not numbers["accuracies"],
        ("detection", "Detection"): numbers.get("detectors"),
        ("curves", "Curves and sweeps" if numbers["sweeps"] else "Curves"): has_curves(data),
        ("mistakes", "Mistakes"): numbers["mistakes"],
        ("several-1", "Results by class"): numbers.get("several_labels"),
        ("labels-1", "Likely wrong labels"): numbers.get("label_issues"),
        ("inside", "Inside the model"): numbers.get("inspections"),
        ("data", "Data"): numbers["datasets"],
        ("provenance", "Provenance"): True,
        ("settings", "Settings"): True,
    }
    return [section for section, content in is_there.items() if content]


def axes(accuracies: Sequence[Mapping[str, Any]], compared: Sequence[Mapping[str, Any]]) -> dict[str, Scale]:
    """Return the scales, in percent of a cell's width, of all accuracies, of the compared ones, and of differences."""
    rows = [row for group in compared for row in group["rows"]]
    verdicts = [row["verdict"] for row in rows if row["verdict"]]
    return {
        "all": _scale(accuracies),
        "accuracy": _scale([row["line"] for row in rows]),
        "difference": _scale([*verdicts, {"low": 0.0, "high": 0.0}]),
    }


def _scale(lines: Iterable[Mapping[str, Any]]) -> Scale:
    """Return a scale that holds all intervals."""
    bounds = [line[bound] for line in lines for bound in ("low", "high")]
    return spread(bounds or [0.0, 1.0], 3, 97, pad=0.02)


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
                f"{name} ({setting(inner)})" if isinstance(inner, dict | list | tuple) else f"{name} {setting(inner)}"
                for name, inner in fields
            )
        case list() | tuple():
            return ", ".join(map(setting, value)) or "none"
    return str(value)


def duration(seconds: float) -> str:
    """Return '4.2 s', '3 min 12 s' or '26 h 5 min'."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


def number(value: float | int | str) -> str:
    """Return '206,986', '5,812' or '0.874': as many digits as a reader needs."""
    if isinstance(value, str | bool):
        return str(value).lower() if isinstance(value, bool) else value
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"


def metric(value: float | int | str, name: str) -> str:
    """Return a stage's metric as 'final loss 0.6136', 'train 8 min 46 s', or small exaflops as 'teraflops 39.13'."""
    if name.endswith("_seconds") and isinstance(value, int | float):
        return f"{name.removesuffix('_seconds').replace('_', ' ')} {duration(value)}"
    if name == "exaflops" and isinstance(value, float) and value < 0.001:
        name, value = "teraflops", 1e6 * value
    return f"{name.replace('_', ' ')} {number(value)}"


def day(time: str) -> str:
    """Return an ISO time as '2026-11-21 08:30 UTC'."""
    return f"{datetime.fromisoformat(time):%Y-%m-%d %H:%M} UTC"
