"""Temporary local copies of files and folders from outside the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipelines.files import s3
from pipelines.scratch import scratch_folder


@contextmanager
def fetched(path: str) -> Iterator[Path]:
    """Yield the local path of a file or folder: the path itself, or a copy from S3 that is removed after the block.

    A model on the Hugging Face hub stays in the user's cache folder; the copy contains links to its files.

    Raises:
        StoreError: it cannot be fetched.
    """
    if not path.startswith(("hf:", "s3://")):
        yield Path(path)
        return
    with scratch_folder() as folder:
        if path.startswith("hf:"):
            from pipelines.files import hub

            yield hub.fetch(hub.pinned(path), folder)
        else:
            yield s3.fetch(path, folder)
