"""Locations of a source's files in a recipe. `pipelines.files.sources` lists the files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from vit_model.fields import Frozen

Location = str | Path
"""A path, s3://bucket/key or hf:ORG/NAME@COMMIT/name."""
Files = Mapping[str, Location]
"""Files by their names in the source."""


class Below(NamedTuple):
    """All files below a folder or s3://bucket/prefix, by their names relative to it."""

    root: str


class At(NamedTuple):
    """A file or object by its name, with its further parts (x.zip.001, x.zip.002, ...); otherwise as `Below`."""

    root: str


class Named(NamedTuple):
    """Named files directly in a folder or at s3://bucket/prefix, in this order; missing ones are skipped."""

    root: str
    names: tuple[str, ...]


class InPackage(NamedTuple):
    """The files in a folder of an installed package that a glob pattern matches."""

    package: str
    folder: str
    pattern: str


class FileSource(Frozen):
    """The base of all sources: the location of their files, and the choice of files that they read."""

    @property
    def has_boxes(self) -> bool:
        """Whether the images have boxes of objects."""
        return False

    @property
    def has_masks(self) -> bool:
        """Whether the images have segmentation masks."""
        return False

    @property
    def has_labels(self) -> bool:
        """Whether the images have classes."""
        return True

    @property
    def has_several_labels(self) -> bool:
        """Whether an image can have several labels, or none."""
        return self.has_boxes

    def where(self) -> Below | At | Named | InPackage:
        """Return where the files are."""
        raise NotImplementedError

    def choose(self, there: Files) -> Files:
        """Return the existing files (`there`) that the result depends on, by their names in the stage.

        Raises:
            RecipeError: files are missing, or a field contradicts another.
        """
        return there
