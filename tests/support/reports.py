"""Reports of artifacts that a test commits."""

from collections.abc import Sequence
from typing import Any

from pipelines.spec import Report
from pipelines.store import Layout, Manifest, Store, input_ref
from ray_jobs import report
from ray_jobs.process.context import Context
from tests.support.records import make_attempt

KEY = "e" * 64


def make_report(store: Store, of: Sequence[Manifest], title: str = "A title", **fields: Any) -> dict[str, bytes]:
    """Make a report of these artifacts, each time by another attempt, and return its files."""
    config = Report(job="report", title=title, of=tuple(manifest.stage for manifest in of), **fields)
    attempt = make_attempt(
        "report",
        key=KEY,
        number=1 + len(store.names(f"artifacts/report/{KEY}/attempts")),
        stage="report",
        run="run",
        store_id=store.id,
        store_uri=store.uri,
        config=config.model_dump(mode="json"),
        inputs={"of": [input_ref(store, manifest) for manifest in of]},
        created="2026-11-21T08:00:00+00:00",
    )
    files = report.make(Context(attempt, config, {"of": tuple(of)})).files
    folder = store.local(Layout.files("report", KEY, attempt.number), ())
    return {entry.path: (folder / entry.path).read_bytes() for entry in files}
