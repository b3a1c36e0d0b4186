"""The command site: static pages about everything in a store."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.commands.common import DEFAULT_STORE, Commands, StoreOption, console, open_, plain
from pipelines.pages.collect import collect
from pipelines.pages.write import place, write
from pipelines.store import all_manifests

app = Commands()


@app.command("site")
def site(
    to: Annotated[str, typer.Option("--to", metavar="FOLDER", help="a folder, or s3://bucket/prefix")] = "site",
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Write static pages about the store's runs, models, schedules and results, with its reports.

    They open from disk or from any web server, and load nothing from the network. The next time, only new runs and
    results are read.
    """
    opened, target = open_(store, create=False), place(to)
    manifests = [*all_manifests(opened)]
    write(opened, collect(opened, manifests), [each for each in manifests if each.kind == "report"], target)
    console.print(f"[bold]{plain(target.first)}[/]", soft_wrap=True)
