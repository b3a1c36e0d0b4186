"""Keeps a study in docs/claims: `python benchmarks/studies.py RECIPE --store FOLDER`.

Runs a shipped recipe with a matrix, or what is left of it, and keeps in docs/claims the number of each member
(RECIPE.parquet: stage, metric, setting, a column per axis, value) and the picture of the report's section about them,
or with --section cost that of accuracy by cost (RECIPE.png; needs Debian's package chromium). Prints the report's
headline, the minutes of all trainings in the store, and the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from common import ROOT, query, setting, vitflow

from pipelines.results.lookup import recipe_and_stage
from pipelines.store import all_manifests, local_file, open_store
from ray_jobs.reporting.studies import is_seed, members
from tests.support.browser import chromium

KEPT = ROOT / "docs" / "claims"
ONLY = "document.querySelectorAll('main > :not(#{0}), #cost > :not(h2, .plots), header').forEach(each => each.remove())"


def main() -> None:
    """Run a study and keep its numbers and its picture."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("recipe", help="a shipped recipe")
    arguments.add_argument("--store", type=Path, required=True, help="a folder, in which an interrupted study goes on")
    arguments.add_argument("--section", choices=["studies", "cost"], default="studies", help="what the picture shows")
    options = arguments.parse_args()
    load = os.getloadavg()[0]
    vitflow("run", options.recipe, store=options.store)
    store = open_store(str(options.store))
    reports = [each for each in all_manifests(store) if each.kind == "report"]
    report = max(
        (each for each in reports if recipe_and_stage(each).startswith(f"{options.recipe}/")),
        key=lambda each: each.finished,
    )
    page, found = (local_file(store, report, name) for name in ("report.html", "report.json"))
    assert page is not None and found is not None
    numbers = json.loads(found.read_text())
    KEPT.mkdir(exist_ok=True)
    pq.write_table(table(numbers), KEPT / f"{options.recipe}.parquet")
    (KEPT / f"{options.recipe}.png").write_bytes(asyncio.run(picture(page, options.section)))
    (trained,) = query(options.store, "SELECT sum((metrics->>'train_seconds')::DOUBLE) AS seconds FROM artifacts")
    print(f"{numbers['headline']}\n{(trained['seconds'] or 0) / 60:.0f} minutes of pretraining; {setting(load)}")


def table(numbers: dict[str, Any]) -> pa.Table:
    """Return a row per member and metric. Seeds are one column, whichever stage they are of."""
    rows = [*members(numbers)]
    axes = sorted({axis for row in rows for axis in row.place if not is_seed(axis)})
    columns = {name: [getattr(row, name) for row in rows] for name in ("stage", "metric", "setting")}
    columns |= {axis: [row.place.get(axis) for row in rows] for axis in axes}
    columns["seed"] = [",".join(label for axis, label in row.place.items() if is_seed(axis)) or None for row in rows]
    return pa.table(columns | {"value": [row.value for row in rows]})


async def picture(page: Path, section: str) -> bytes:
    """Return a PNG of a section of a report."""
    with tempfile.TemporaryDirectory(prefix="vfb-", ignore_cleanup_errors=True) as profile:
        async with chromium(Path(profile)) as tab:
            await tab.open(page)
            await tab.show(900, "light")
            await tab.evaluate(ONLY.format(section))
            return await tab.picture(whole=True)


if __name__ == "__main__":
    main()
