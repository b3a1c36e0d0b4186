"""The fingerprint of a stage's source: the contents and names of its files.

Where the files lie, and when they were touched, does not matter.
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
    """The fingerprint of the files that a stage reads from outside: their names and contents; None: it reads none.

    Raises:
        RecipeError: there are no files, or one can't be read.
        StoreUnreachable: they are on S3, which does not answer.
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
    """sha256 over what `file_digests` says of all files."""
    return sha256(canonical_json(sorted(file_digests(files))))
