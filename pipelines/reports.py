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
    ]


def accuracy_table(report: dict[str, Any]) -> Table:
    """Accuracies on test in percent, a section for each task, protocol and number of labels a class; 80 columns do."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=Text(report["title"]), title_justify="left"
    )
    for name in ("task", "protocol"):
        table.add_column(name, overflow="fold")
    table.add_column("labels a class", justify="right", max_width=6)
    table.add_column("method", overflow="fold")
    table.add_column("accuracy %", justify="right", min_width=8)
    table.add_column("95 % interval", justify="right", no_wrap=True)
    for name in ("draws", "images"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("artifact", no_wrap=True)
    before: tuple[str, ...] | None = None
    for line in report["accuracies"]:
        heading = (line["task"], line["protocol"], str(line["labels_per_class"] or "all"))
        if before not in (None, heading):
            table.add_section()
        interval = f"{100 * line['low']:.1f}–{100 * line['high']:.1f}"
        counts = (f"{100 * line['accuracy']:.1f}", interval, str(line["draws"]), str(line["num_images"]))
        shown = ("", "", "") if heading == before else heading
        table.add_row(*map(Text, (*shown, line["method"], *counts, line["artifact"][:8])))
        before = heading
    return table
