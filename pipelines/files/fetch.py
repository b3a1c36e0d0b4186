"""A file or folder from outside, brought to this machine for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


@contextmanager
def fetched(path: str) -> Iterator[Path]:
    """A file or folder from outside on this machine: itself, or a copy of what is on S3, gone after the block.

    A model on the Hugging Face hub stays in the hub's own cache; the folder has links to its files.

    Raises:
        StoreError: it can't be fetched.
    """
    if not path.startswith(("hf:", "s3://")):
        yield Path(path)
        return
    with TemporaryDirectory(prefix="vitflow-") as folder:
        if path.startswith("hf:"):
            from pipelines.files import hub

            yield hub.fetch(hub.pinned(path), Path(folder))
        else:
            from pipelines.files.s3 import fetch

            yield fetch(path, Path(folder))
