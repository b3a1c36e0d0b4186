"""A small valid example of every source, for the tests that hold for all: readers, S3, fuzzing, whole runs, docs.

Each module of this folder has `EXAMPLES`. A new source adds a module; a test fails for a kind without an example.
"""

import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter

from pipelines.files.sources import source_files
from pipelines.spec import Source
from ray_jobs.sources import catalog

LIBRARY = 0.02  # the share of mutations of sources with files that the sandbox reads
READ = TypeAdapter[Any](Source).validate_python


class Example(NamedTuple):
    """Files in their authors' format, written without the reader's code, and what they hold."""

    name: str
    """The name of a stage, unique."""
    fields: Mapping[str, Any]
    """The fields of the source, without `root`."""
    files: Callable[[], Mapping[str, bytes]] = dict
    """The content of each file, by its name below the root; none: the source has no root."""
    root: str = ""
    """The file that is the root, if it is not the folder."""
    images: Mapping[str, tuple[int, bytes | np.ndarray]] | int = 0
    """Key -> (label, the image: a file's bytes or pixels), or how many there are that can be used."""
    splits: Mapping[str, str] | None = None
    """Key -> the split that the files give the image; None: not checked here."""
    quarantined: int = 0
    refused: Mapping[str, Mapping[str, bytes]] = {}
    """A pattern of the message -> the damaged files that it is about."""
    fuzzed: Mapping[str, float] | None = None
    """The files to mutate, and how often (1: always; less if one takes long); None: all."""

    @property
    def kind(self) -> str:
        return str(self.fields["kind"])

    @property
    def has_root(self) -> bool:
        return self.files is not dict

    def shares(self) -> Mapping[str, float]:
        """Return the files to mutate, and how often."""
        return dict.fromkeys(self.files(), 1.0) if self.fuzzed is None else self.fuzzed

    def put(self, folder: Path, **changed: bytes) -> dict[str, Any]:
        """Write the files into a folder and return the fields of the source."""
        for name, data in {**self.files(), **changed}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return self.at(str(folder))

    def at(self, folder: str) -> dict[str, Any]:
        """Return the fields of the source if its files are in this folder, or at s3://bucket/prefix."""
        root = f"{folder}/{self.root}" if self.root else folder
        return {**self.fields} | ({"root": root} if self.has_root else {})


def read(fields: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return the listing's entries, and the image of each."""
    source = READ(fields)
    files = {name: str(place) for name, place in source_files(source).items()}
    entries = catalog.listing(source, files).entries
    return entries.to_pylist(), list(catalog.images(source, files, entries))


def written(put: Callable[[Path], object]) -> dict[str, bytes]:
    """Return the files that `put` writes into a folder."""
    with tempfile.TemporaryDirectory() as folder:
        put(Path(folder))
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def _every() -> list[Example]:
    modules = sorted(module.name for module in iter_modules(__path__))
    return [example for name in modules for example in import_module(f"{__name__}.{name}").EXAMPLES]


EXAMPLES: list[Example] = _every()
