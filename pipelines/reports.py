"""A report's numbers for people at a terminal: its verdict and its table of accuracies.

In: report.json as a dictionary. Out: lines, and a rich table. Text from outside (class and method names) is never read
as markup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def verdict_lines(report: dict[str, Any]) -> list[str]:
    """The question, its answer, and a sentence for each comparison."""
    return [
        f"{report['question']} {report['headline']}",
        *(verdict["sentence"] for verdict in report["verdicts"]),
        *filter(None, [report["note"]]),
    ]


def accuracy_table(report: dict[str, Any]) -> Table:
    """Accuracies on test in percent, under a heading for each task, protocol and number of labels; 80 columns do."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=Text(report["title"]), title_justify="left"
    )
    table.add_column("method", overflow="fold")
    table.add_column("accuracy %", justify="right", min_width=8)
    table.add_column("95 % interval", justify="right", min_width=10)
    for name in ("draws", "images"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("artifact", no_wrap=True)
    before = ""
    for line in report["accuracies"]:
        heading = f"{line['task']}, {line['protocol']}, {_labels(line)}"
        if heading != before:
            table.add_section()
            table.add_row(Text(heading, style="bold"))
        interval = f"{100 * line['low']:.1f}–{100 * line['high']:.1f}"
        counts = (f"{100 * line['accuracy']:.1f}", interval, str(line["draws"]), str(line["num_images"]))
        table.add_row(*map(Text, (f"  {line['method']}", *counts, line["artifact"][:8])))
        before = heading
    return table


def _labels(line: dict[str, Any]) -> str:
    return "all labels" if line["labels_per_class"] is None else f"{line['labels_per_class']} a class"
