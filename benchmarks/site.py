"""`vitflow site` for a store with 1,000 runs, and its pages in Chromium: `python benchmarks/site.py`.

Makes the store in a folder and on a Ceph, which must be installed; writes the site once, and again whenever a run was
added. Opens the pages from disk.
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

from pipelines.store import Store, open_store
from tests.support.browser import chromium
from tests.support.documented import put_quickstart
from tests.support.many_runs import put_many_runs
from tests.support.s3 import running_ceph

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
        with running_ceph() as server:
            os.environ.update(server.environment)
            bucket = server.bucket()
            for path in folder.joinpath("store").rglob("*"):
                if path.is_file():
                    bucket.write(str(path.relative_to(folder / "store")), path.read_bytes())
            on_ceph = _written(open_store(f"s3://{bucket.name}"), folder / "site")
        in_folder = _written(store, folder / "site")
        size = sum(path.stat().st_size for path in (folder / "site").glob("*.*"))
        painted, shown = asyncio.run(_seen(folder))
    rows = [
        row
        for place, (first, later) in (("in a folder", in_folder), ("on Ceph, on this machine", on_ceph))
        for row in (
            (f"`vitflow site`, {RUNS:,} runs {place}, for the first time", first, ""),
            (f"again with one new run, median of {TIMES}", later, "< 5 s"),
        )
    ]
    rows.append(("first contentful paint, from disk", painted, "< 1 s"))
    rows += [(f"page `{page}`, built and laid out", seconds, "") for page, seconds in shown.items()]
    head = ["# The site of a store", "", f"`python benchmarks/site.py`, {setting(load)}. Whole processes.", ""]
    keep("site.md", [*head, *values(rows), "", f"{size / 1e6:.1f} MB without the reports; target: < 3 MB."])


def _written(store: Store, site: Path) -> tuple[float, float]:
    """Write the site, and again after each new run; return the seconds of the first time and the others' median."""
    taken = []
    for number in range(RUNS, RUNS + TIMES + 1):
        began = time.monotonic()
        vitflow("site", "--to", str(site), store=store.uri)
        taken.append(time.monotonic() - began)
        put_many_runs(store, range(number, number + 1))
    return taken[0], statistics.median(taken[1:])


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
