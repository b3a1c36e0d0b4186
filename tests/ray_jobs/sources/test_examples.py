"""What holds for every source, shown on its example (`tests.support.examples`)."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.files.sources import source_files
from pipelines.identity import PROJECT
from pipelines.spec import SOURCE_TYPES, RecipeError
from tests.support.examples import EXAMPLES, READ, Example, read
from tests.support.s3 import Server, used
from vit_model.errors import UserError

each = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
with_root = pytest.mark.parametrize(
    "example", [example for example in EXAMPLES if example.has_root], ids=lambda example: example.name
)


def bytes_of(image: Any) -> Any:
    return image.tobytes() if isinstance(image, np.ndarray) else image if isinstance(image, bytes) else str(image)


@pytest.mark.parametrize("kind", SOURCE_TYPES)
def test_every_kind_has_an_example_and_a_row_in_the_docs(kind: str) -> None:
    assert any(example.kind == kind for example in EXAMPLES), "add a module to tests/support/examples"
    rows = [line for line in (PROJECT / "docs/data.md").read_text().splitlines() if line.startswith("| `")]
    assert any(f"`{kind}`" in row for row in rows), "add it to the table of docs/data.md"


@each
def test_what_is_written_is_read(example: Example, tmp_path: Path) -> None:
    entries, images = read(example.put(tmp_path))
    usable = [image for image in images if not isinstance(image, UserError)]
    assert all(isinstance(image, bytes) or (image.dtype == np.uint8 and image.ndim == 3) for image in usable)
    if example.splits is not None:
        assert {entry["key"]: entry["split"] for entry in entries} == example.splits
    if isinstance(example.images, int):
        assert example.images < 0 or len(entries) == example.images + example.quarantined
        return
    found = {entry["key"]: (entry["label"], image) for entry, image in zip(entries, images, strict=True)}
    assert found.keys() == example.images.keys()
    for key, (label, image) in example.images.items():
        assert found[key][0] == label and bytes_of(found[key][1]) == bytes_of(image), key


@pytest.mark.parametrize(
    ("example", "message"),
    [
        pytest.param(example, message, id=f"{example.name}: {message}")
        for example in EXAMPLES
        for message in example.refused
    ],
)
def test_a_damaged_file_is_named(example: Example, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read(example.put(tmp_path, **example.refused[message]))


@pytest.mark.slow  # it starts a server
@with_root
def test_on_s3_as_on_disk(example: Example, tmp_path: Path, moto: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = example.put(tmp_path)
    with used(moto, monkeypatch):
        bucket = moto.bucket()
        for name, data in example.files().items():
            bucket.write(f"data/{name}", data)
        entries, images = read(example.at(f"s3://{bucket.name}/data"))
    on_disk, from_disk = read(fields)
    assert {entry["key"]: entry for entry in entries} == {entry["key"]: entry for entry in on_disk}
    assert [*map(bytes_of, images)] == [*map(bytes_of, from_disk)]


@pytest.mark.parametrize("kind", [kind for kind, type_ in SOURCE_TYPES.items() if "root" in type_.model_fields])
def test_files_that_are_missing_are_an_error_of_the_root(kind: str, tmp_path: Path) -> None:
    example = next(example for example in EXAMPLES if example.kind == kind)
    with pytest.raises(RecipeError, match=rf"^source\.root: {re.escape(str(tmp_path / 'none'))}"):
        source_files(READ(example.at(str(tmp_path / "none"))))
