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
    """Accuracies on test in percent, a section for each task, protocol and number of labels."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, title=Text(report["title"]), title_justify="left")
    for name in ("task", "protocol", "labels", "method"):
        table.add_column(name, overflow="fold")
    for name in ("accuracy %", "95 % interval", "draws", "images"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("artifact", no_wrap=True)
    before: tuple[str, ...] | None = None
    for line in report["accuracies"]:
        heading = (line["task"], line["protocol"], line["labels"])
        if before not in (None, heading):
            table.add_section()
        interval = f"{100 * line['low']:.1f}–{100 * line['high']:.1f}"
        counts = (f"{100 * line['accuracy']:.1f}", interval, str(line["draws"]), str(line["num_images"]))
        cells = (
            *(("", "", "") if heading == before else heading),
            line["method"],
            *counts,
            line["artifact"][:12],
        )
        table.add_row(*map(Text, cells))
        before = heading
    return table
