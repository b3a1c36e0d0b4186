"""The readers of every kind of source: list its images, and read them in any order."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.spec import Source
from ray_jobs.data.columns import ENTRIES
from ray_jobs.data.masks import Mask
from ray_jobs.sources import folder_masks, vtab
from ray_jobs.sources.archives import containers
from ray_jobs.sources.archives.entries import Files, Listing
from ray_jobs.sources.readers import (
    cifar,
    digits,
    folder,
    glyphs,
    hf_parquet,
    idx,
    imagenet,
    imagenet21k,
    scenes,
    shape_masks,
    shapes,
    tfds,
    webdataset,
)
from ray_jobs.sources.readers.features import one_spelling
from ray_jobs.sources.vtab import pet_masks
from vit_model.errors import UserError

_KINDS = (  # modules are called as the kinds of their sources
    *(cifar, digits, folder, glyphs, hf_parquet, idx, imagenet, imagenet21k),
    *(scenes, shapes, tfds, vtab, webdataset),
)
_MODULES: dict[str, ModuleType] = {module.__name__.rpartition(".")[2]: module for module in _KINDS}
_WITH_MASKS: dict[str, ModuleType] = {"shapes": shape_masks, "vtab": pet_masks, "folder": folder_masks}


def listing(source: Source, files: Files) -> Listing:
    """List the images of a source.

    Raises:
        UserError: a file is not in its authors' format; the message names the file.
    """
    listed: Listing = _MODULES[source.kind].listing(source, files)
    return listed._replace(entries=_with_one_spelling(listed.entries))


def _with_one_spelling(entries: pa.Table) -> pa.Table:
    """Return the entries with one spelling per group (`one_spelling`), so that a patient stays in one split."""
    groups = entries["group"].combine_chunks().dictionary_encode()
    texts = groups.dictionary.to_pylist()
    spelled = one_spelling(texts)
    if all(spelled[text] == text for text in texts):
        return entries
    new = pa.array([spelled[text] for text in texts], pa.large_string()).take(groups.indices)
    return entries.set_column(entries.schema.get_field_index("group"), ENTRIES.field("group"), new)


def images(source: Source, files: Files, entries: pa.Table) -> Iterator[bytes | NDArray[np.uint8] | UserError]:
    """Yield the image of each entry, in order: a file's bytes, pixels [h, w, c], or why it cannot be read."""
    codecs = set(entries["codec"].to_pylist())
    if codecs == {"row"}:
        yield from _MODULES[source.kind].rows(source, files, entries["offset"].to_pylist())
    else:
        assert "row" not in codecs, "a source has its images in arrays or in files"
        processed = getattr(_MODULES[source.kind], "processed", lambda _source, _key, image: image)
        for key, image in zip(entries["key"].to_pylist(), containers.read(files, entries), strict=True):
            try:
                yield image if isinstance(image, UserError) else processed(source, key, image)
            except UserError as error:
                yield error


def mask_classes(source: Source) -> tuple[str, ...]:
    """Return the names of the classes in a source's masks; empty if it is read without masks."""
    if not source.has_masks:
        return ()
    names: tuple[str, ...] = getattr(source, "mask_classes", None) or _WITH_MASKS[source.kind].MASK_CLASSES
    return names


def masks(source: Source, files: Files, entries: pa.Table) -> Iterator[Mask | UserError]:
    """Yield the mask [h, w] of each entry's image, in order, or why it cannot be used."""
    yield from _WITH_MASKS[source.kind].masks(source, files, entries)
