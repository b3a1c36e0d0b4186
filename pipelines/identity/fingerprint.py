"""The fingerprint of a stage's source: the contents and names of its files.

The files' location and times do not matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pipelines.errors import StoreError, StoreUnreachable
from pipelines.files.digests import file_digests
from pipelines.files.sources import stage_files
from pipelines.identity.key import canonical_json, sha256
from pipelines.spec import AnyStage, RecipeError


def source_fingerprint(config: AnyStage) -> str | None:
    """Return the fingerprint of the files that a stage reads from outside the store; None if it reads none.

    Raises:
        RecipeError: there are no files, or one cannot be read.
        StoreUnreachable: the files are on S3, which does not answer.
    """
    try:
        files = stage_files(config)
        if files is None:
            return None
        if not files:
            raise RecipeError(f"{config.job}: its source has no files")
        return files_fingerprint(files.items())
    except OSError as error:
        raise RecipeError(f"{error.filename}: {error.strerror}") from None
    except StoreUnreachable:
        raise
    except StoreError as error:
        raise RecipeError(str(error)) from None


def files_fingerprint(files: Iterable[tuple[str, str | Path]]) -> str:
    """Return the sha256 over the `file_digests` of all files."""
    return sha256(canonical_json(sorted(file_digests(files))))
