"""report ...: the reports of finished runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.commands.common import (
    DEFAULT_STORE,
    JsonOption,
    StoreOption,
    console,
    open_,
    plain,
    print_json,
    print_table,
)
from pipelines.store import Manifest, Store, local_files

if TYPE_CHECKING:
    pass

app = typer.Typer(no_args_is_help=True, help="Reports of finished runs, and every number behind them.")


@app.command("list")
def report_list(store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """List the reports of this store."""
    from pipelines.store import all_manifests

    opened = open_(store, create=False)
    rows = [
        {
            "key": manifest.key[:12],
            "run": manifest.run,
            "finished": manifest.finished[:19],
            "title": manifest.config["title"],
            "page": f"{opened.uri}/{manifest.folder}/report.html",
        }
        for manifest in all_manifests(opened)
        if manifest.kind == "report"
    ]
    if as_json:
        print_json(rows)
    else:
        print_table(rows, ("key", "run", "finished", "title", "page"))


@app.command("show")
def report_show(
    report: Annotated[
        str | None, typer.Argument(help="a report's key or RUN; without it, the newest")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Print a report's verdict and its table of accuracies."""
    from pipelines.lookup import find_artifact

    opened = open_(store, create=False)
    manifest = find_artifact(opened, report, "report")
    if as_json:
        print_json(json.loads((local_files(opened, manifest) / "report.json").read_text()))
    else:
        show_report(opened, manifest)


def show_report(store: Store, manifest: Manifest) -> None:
    """A report's table, its verdict, and where its page is."""
    from pipelines.reports import accuracy_table, verdict_lines

    folder = local_files(store, manifest)
    report = json.loads((folder / "report.json").read_text())
    console.print(accuracy_table(report))
    for line in verdict_lines(report):
        console.print(plain(line), highlight=False)
    console.print(f"report: [bold]{plain(str(folder / 'report.html'))}[/]", highlight=False, soft_wrap=True)
