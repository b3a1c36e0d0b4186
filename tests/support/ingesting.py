"""Ingest in this process, without Ray."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pipelines.spec import Ingest
from pipelines.store import Manifest, Store
from ray_jobs import ingest
from tests.support.records import make_context, make_manifest


def in_tasks_here(function: Callable[..., Any], shared: Sequence[Any], items: Sequence[Any], unit: str) -> list[Any]:
    """Call the function on each item, in place of `ingest.in_tasks`."""
    return [function(*shared, item) for item in items]


def ingest_here(store: Store, source: dict[str, Any], **fields: Any) -> Manifest:
    """Ingest a source; returns the manifest of the result, which is not committed."""
    config = Ingest.model_validate({"job": "ingest", "source": source} | fields)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ingest, "in_tasks", in_tasks_here)
        result = ingest.main(make_context(store, config))
    return make_manifest("ingest", files=result.files, content_digest=result.content_digest)
