"""Measured accuracies for the terminal: a report's verdict and tables, lists of results.

Out: lines, dictionaries for JSON, and rich tables. Text from outside (class and method names) is never read as markup.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import groupby
from operator import itemgetter
from statistics import NormalDist
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from pipelines.engine.history import recipe_of
from pipelines.results.sql.query import query
from pipelines.spec import RecipeError, nearest
from pipelines.store import Store

_SETTING = ("task", "protocol", "method", "labels_per_class")
BEST_COLUMNS: tuple[str, ...] = (*_SETTING, "num_images", "mean", "judged", "optimism", "recipe/stage", "key")
RESULT_COLUMNS: tuple[str, ...] = (*_SETTING, "metric", "mean", "draws", "recipe/stage", "key", "run")
MOST_SENTENCES, MOST_LINES = 12, 100  # comparisons and accuracies; more are only on the report's page
ANSWERING = 10  # accuracies at the end of a run


def answering(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the accuracies that a report's comparisons are about; without any, the first ones. At most ANSWERING."""
    setting = itemgetter("task", "labels_per_class", "protocol", "artifact", "method")
    reference = itemgetter("task", "labels_per_class", "reference_protocol", "reference_artifact", "reference")
    compared = {side(verdict) for verdict in report["verdicts"] for side in (setting, reference)}
    lines = [line for line in report["accuracies"] if not compared or setting(line) in compared]
    return lines[:ANSWERING]


def verdict_lines(report: dict[str, Any], is_brief: bool = False) -> list[str]:
    """Return VTAB's means, what promotions decided, the question, its answer and advice, and the missing stages.

    If it is not brief, also the note, and a sentence per comparison if there are several: the answer is about one.
    """
    missing, verdicts = report.get("missing", []), [] if is_brief else report["verdicts"]
    return [
        *(score["sentence"] for score in report.get("vtab", []) if score["trained"]),
        *(promotion["sentence"] for promotion in report.get("promotions", [])),
        f"{report['question']} {report['headline']}",
        *filter(None, [report.get("advice")]),
        *(verdict["sentence"] for verdict in verdicts if 1 < len(verdicts) <= MOST_SENTENCES),
        *filter(None, [] if is_brief else [report["note"]]),
        *([f"Not made, so not in this report: {', '.join(missing)}."] if missing else []),
    ]


def accuracy_table(report: dict[str, Any]) -> Table:
    """Return a table of test accuracies in percent, at most 80 columns wide.

    Each task, protocol and number of labels has a heading, and the best method comes first.
    """
    table = table_with_title(report["title"])
    table.add_column("method", overflow="fold")
    table.add_column("accuracy %", justify="right", min_width=8)
    table.add_column("95% interval", justify="right", min_width=10)
    for name in ("draws", "images"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("stage", overflow="fold")
    for name, lines in groupby(report["accuracies"], _heading):
        add_headings(table, name)
        for line in sorted(lines, key=lambda line: (line["apart"], -line["accuracy"])):
            _add_cells(table, line, f"{100 * line['accuracy']:.1f}", _range(line))
    return table


def metrics_table(metrics: list[dict[str, Any]]) -> Table:
    """Return a table of a report's metrics other than accuracy, in percent, at most 80 columns wide."""
    table = table_with_title(None)
    table.add_column("method", overflow="fold")
    intervals = ["95% interval"] if any(line.get("low") is not None for line in metrics) else []
    for name in ("metric", "mean %", *intervals, "draws", "images"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("stage", overflow="fold")
    for name, lines in groupby(metrics, _heading):
        add_headings(table, name.removesuffix(", all labels"))
        for line in lines:
            interval = [_range(line)] if intervals else []
            _add_cells(table, line, line["metric"], f"{100 * line['value']:.1f}", *interval)
    return table


def _range(line: dict[str, Any]) -> str:
    """Return the ends of a line's interval; a dash if it has none."""
    return "–" if line.get("low") is None else f"{100 * line['low']:.1f}–{100 * line['high']:.1f}"


def table_with_title(title: str | None, **settings: Any) -> Table:
    """Return an empty table in the style of reports."""
    shown = None if title is None else Text(title)
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=shown, title_justify="left", **settings)


def add_headings(table: Table, *headings: str) -> None:
    """Begin a section with these bold lines."""
    table.add_section()
    for heading in headings:
        table.add_row(Text(heading, style="bold"))


def _heading(line: dict[str, Any]) -> str:
    return f"{line['task']}, {line['protocol']}, {labels_of(line)}"


def _add_cells(table: Table, line: dict[str, Any], *cells: str) -> None:
    """Add a line's method, these cells, its counts and its stage."""
    counts = (str(line["draws"]), str(line["num_images"]), line["stage"])
    table.add_row(*map(Text, (f"  {line['method']}", *cells, *counts)))


def vtab_table(score: dict[str, Any]) -> Table:
    """Return a table of one VTAB score of a report, in percent, at most 80 columns wide.

    It has a line per task, and the means of each group and of all tasks.
    """

    def add_line(name: str, values: list[float | None], style: str = "") -> None:
        cells = ["–" if value is None else f"{100 * value:.1f}" for value in values]
        table.add_row(*(Text(cell, style) for cell in (name, *cells)))

    title = f"VTAB-1k, {score['method']} ({score['backbone']})"
    table = table_with_title(title, min_width=len(title))
    table.add_column("accuracy %")
    for column in score["columns"]:
        table.add_column(Text(column["labels"]), justify="right")
    for group in score["columns"][0]["groups"]:
        add_line(group, [column["groups"][group]["mean"] for column in score["columns"]], "bold")
        for task in score["tasks"]:
            if task["group"] == group:
                add_line(f"  {task['title']}", task["accuracies"], "dim" if task["missing"] else "")
    title = f"mean over {score['covered']} of {len(score['tasks'])} tasks"
    add_line(title, [column["mean"] for column in score["columns"]], "bold")
    return table


def labels_of(line: dict[str, Any]) -> str:
    """Return 'all labels' or '5 per class'."""
    return "all labels" if line["labels_per_class"] is None else f"{line['labels_per_class']} per class"


# ------------------------------------------------------------------------------------------------- lists


def list_results(store: Store, task: str | None, stage: str | None, best: str | None) -> list[dict[str, Any]]:
    """List the mean on test over the draws of each (artifact, task, protocol, method, number of labels, metric).

    The oldest result comes first. With `best`, a metric, only the highest of each (task, number of test images,
    protocol, number of labels) that covers all of test is listed: a dataset that has grown has other test images. It
    comes with `judged`, the number of results in this setting, without references, and `optimism`, see
    `expected_optimism`; None for metrics other than accuracy.

    Raises:
        RecipeError: there are no results with this task, stage or metric.
    """
    table = "rows" if best in (None, "accuracy") else "scores"
    sql = f"""
        SELECT task, protocol, method, labels_per_class, metric, avg(value) AS mean, count(*) AS draws,
               any_value(num_images) AS num_images, stage, artifact AS key, run,
               strftime(finished, '%Y-%m-%dT%H:%M:%S') AS finished
        FROM {table} WHERE split = 'test' GROUP BY ALL
        ORDER BY finished, key, task, protocol, labels_per_class, method"""  # noqa: S608 (a name of ours)
    with query(store, sql) as answer:
        everything = [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]
    for row in everything:
        row["recipe/stage"] = f"{recipe_of(row['run'])}/{row['stage']}"
    results = everything
    options = {"task": (task, "task"), "stage": (stage, "stage"), "best": (best, "metric")}
    for option, (value, column) in options.items():
        names = sorted({row[column] for row in results})
        if value is not None and value not in names:
            raise RecipeError(f"--{option} {value}: {store.uri} has no such results{nearest(value, names)}")
        results = [row for row in results if value in {None, row[column]}]
    if best is None:
        return results
    from ray_jobs.evaluation.rows import ACCURACY, is_apart, is_reference

    def setting(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("task", "num_images", "protocol", "labels_per_class", "metric"))

    judged = Counter(setting(row) for row in everything if not (is_apart(row["method"]) or is_reference(row["method"])))
    highest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in (row for row in results if not is_apart(row["method"])):
        # or the newest
        highest[setting(row)] = max(row, highest.get(setting(row), row), key=itemgetter("mean"))
    for found, row in highest.items():
        row["judged"] = max(1, judged[found])  # 1: only references, of which this is the best
        is_count = row["metric"] == ACCURACY  # the formula is for counts of right images
        row["optimism"] = expected_optimism(row["judged"], row["mean"], row["num_images"]) if is_count else None
    return [row for row in results if row in highest.values()]


def expected_optimism(judged: int, accuracy: float, images: int) -> float:
    """Return how much the best of several equally good results is expected to exceed its true accuracy, a fraction.

    It is the expected maximum of `judged` independent binomial accuracies on `images` test images, by the normal
    approximation: an upper bound, because results on the same images are correlated and not equally good.
    """
    normal, steps = NormalDist(), 4_000
    # E[max] = integral of x times the density of the maximum, n pdf(x) cdf(x)^(n - 1), over +-8 by the trapezoidal rule
    points = [16 * step / steps - 8 for step in range(steps + 1)]
    density = (x * judged * normal.pdf(x) * normal.cdf(x) ** (judged - 1) for x in points)
    return 16 / steps * sum(density) * math.sqrt(accuracy * (1 - accuracy) / images)
