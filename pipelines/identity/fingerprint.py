"""The fingerprint of a stage's source: the contents and names of its files.

The files' location and times do not matter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from pipelines.errors import StoreError, StoreUnreachable
from pipelines.files.digests import file_digests
from pipelines.files.sources import stage_files
from pipelines.identity.key import canonical_json, sha256
from pipelines.spec import AnyStage, RecipeError

LISTINGS = 3  # of a source; all but the first because a listed file was gone


def source_fingerprint(config: AnyStage) -> str | None:
    """Return the fingerprint of the files that a stage reads from outside the store, see `listed_source`."""
    return listed_source(config)[0]


def listed_source(config: AnyStage, names: Collection[str] | None = None) -> tuple[str | None, tuple[str, ...]]:
    """Return the fingerprint and the names of the files that a stage reads from outside the store; None: it reads none.

    Args:
        names: the files to include; None: all.

    Raises:
        RecipeError: there are no files, or one cannot be read.
        StoreUnreachable: the files are on S3, which does not answer.
    """
    try:
        for _ in range(LISTINGS):
            files = stage_files(config)
            if files is None:
                return None, ()
            files = {name: place for name, place in files.items() if names is None or name in names}
            if not files:
                raise RecipeError(f"{config.job}: its source has no files")
            try:
                return files_fingerprint(files.items()), tuple(files)
            except RecipeError:
                if all(place.exists() for place in files.values() if isinstance(place, Path)):
                    raise  # otherwise a file was removed after it was listed, such as an upload's temporary file
        raise RecipeError(f"{config.job}: source files are being removed; rerun when this has ended")
    except OSError as error:
        raise RecipeError(f"{error.filename}: {error.strerror}") from None
    except StoreUnreachable:
        raise
    except StoreError as error:
        raise RecipeError(str(error)) from None


def files_fingerprint(files: Iterable[tuple[str, str | Path]]) -> str:
    """Return the sha256 over the `file_digests` of all files."""
    return sha256(canonical_json(sorted(file_digests(files))))
