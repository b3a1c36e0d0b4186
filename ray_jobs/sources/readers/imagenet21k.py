"""ImageNet-21k as its authors ship it: one tar per synset, in one tar (gzipped or not) or in a folder.

A label is the rank of the class's WNID among the classes that are used. The two releases, and lists derived from them,
have different classes (Ridnik et al., "ImageNet-21K Pretraining for the Masses", 2021). Class names are WNIDs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipelines.spec.archives import ImageNet21kSource
from ray_jobs.sources import hash_fraction
from ray_jobs.sources.archives.entries import Files, Listing, Unusable, table
from ray_jobs.sources.readers.imagenet import SALT, SYNSET_TAR, row, synsets, tars_in
from vit_model.errors import UserError

_SPLITS = ("dev", "test", "train")


def listing(source: ImageNet21kSource, files: Files) -> Listing:
    """List the images of every synset. dev and test are drawn by a hash of names: there are no official splits.

    Raises:
        UserError: a duplicate synset, or none with enough images.
    """
    unusable: list[Unusable] = []
    class_names: list[str] = []
    left_out: list[str] = []
    (first, *_) = files
    chains = list(files) if SYNSET_TAR.fullmatch(first) else tars_in(files, first, unusable)

    def rows() -> Iterator[dict[str, Any]]:
        for wnid, images in synsets(files, chains, unusable):
            if len(images) < source.min_images:
                left_out.append(wnid)
                continue
            class_names.append(wnid)
            for member in images:
                key = f"{wnid}/{member.path}"
                drawn = int(hash_fraction(SALT, key) / source.held_out)
                yield row(key, len(class_names) - 1, _SPLITS[min(drawn, 2)], member)

    entries = table(rows())
    if not class_names:
        raise UserError(f"{source.root} has no synset with at least {source.min_images} images; lower min_images")
    notes = [f"no official splits: {source.held_out:.2%} each are dev and test by a hash of names"]
    if left_out:
        notes.append(f"left out, with fewer than {source.min_images} images: {', '.join(left_out)}")
    return Listing(tuple(class_names), entries, unusable=tuple(unusable), notes=tuple(notes))
