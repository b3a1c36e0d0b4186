"""`vitflow site` for a store with 1,000 runs, and its pages in Chromium: `python benchmarks/site.py`.

Makes the store, writes the site once, and again whenever a run was added. Opens the pages from disk.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from common import keep, setting, values, vitflow

from pipelines.store import open_store
from tests.support.browser import chromium
from tests.support.documented import put_quickstart
from tests.support.many_runs import put_many_runs

RUNS, TIMES = 1_000, 5
PAGES = ("overview", "runs", "models", "schedules", "task/digits")


def main() -> None:
    """Make the store, write the site, look at it, keep the table."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="vfb-") as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        store = open_store(str(folder / "store"))
        put_quickstart(store)
        put_many_runs(store, range(RUNS))
        first, later = _written(folder), []
        for number in range(RUNS, RUNS + TIMES):
            put_many_runs(store, range(number, number + 1))
            later.append(_written(folder))
        size = sum(path.stat().st_size for path in (folder / "site").glob("*.*"))
        painted, shown = asyncio.run(_seen(folder))
    rows = [
        (f"`vitflow site`, {RUNS:,} runs, for the first time", first, ""),
        (f"again with one new run, median of {TIMES}", statistics.median(later), "< 5 s"),
        ("first contentful paint, from disk", painted, "< 1 s"),
        *((f"page `{page}`, built and laid out", seconds, "") for page, seconds in shown.items()),
    ]
    head = ["# The site of a store", "", f"`python benchmarks/site.py`, {setting(load)}. Whole processes.", ""]
    keep("site.md", [*head, *values(rows), "", f"{size / 1e6:.1f} MB without the reports; target: < 3 MB."])


def _written(folder: Path) -> float:
    began = time.monotonic()
    vitflow("site", "--to", str(folder / "site"), store=folder / "store")
    return time.monotonic() - began


async def _seen(folder: Path) -> tuple[float, dict[str, float]]:
    """Return the seconds to the first paint, and for each page."""
    async with chromium(folder / "profile") as tab:
        for _ in range(2):  # the browser itself has started by the second time
            await tab.open(folder / "site" / "index.html")
        await asyncio.sleep(1)
        painted = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        steps = "const t = performance.now(); location.hash = %s; show(); document.body.offsetHeight"
        shown = f"(() => {{ {steps}; return performance.now() - t }})()"
        return await tab.evaluate(painted) / 1e3, {
            page: await tab.evaluate(shown % json.dumps(page)) / 1e3 for page in PAGES
        }


if __name__ == "__main__":
    main()
