"""Which of the files that are there a source reads. It follows from their names: no test here needs a file."""

from typing import Any

import pytest
from pydantic import TypeAdapter

from pipelines.spec import CIFAR_FILES, Source
from pipelines.spec.files import FileSource

IDX = [f"{name}-ubyte" for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")]
_, CIFAR = CIFAR_FILES[10, "binary"]
TFDS = ["dataset_info.json", "features.json", "x-train.tfrecord-00000-of-00001"]


def source(kind: str, **fields: Any) -> FileSource:
    return TypeAdapter[Any](Source).validate_python({"kind": kind, "root": "/nowhere"} | fields)


def chosen(of: FileSource, *there: str) -> dict[str, str]:
    return {name: str(place) for name, place in of.choose({name: f"/nowhere/{name}" for name in there}).items()}


def test_of_an_idx_file_and_its_gz_the_gz_is_read_under_the_files_name() -> None:
    there = [*IDX, f"{IDX[1]}.gz"]
    assert chosen(source("idx"), *there) == {name: f"/nowhere/{name}" for name in IDX} | {
        IDX[1]: f"/nowhere/{IDX[1]}.gz"
    }


@pytest.mark.parametrize(
    ("kind", "read", "left"),
    [
        ("hf_parquet", ["train-0.parquet", "more/test-0.parquet"], ["README.md"]),
        ("tfds", TFDS, ["1.0.0/dataset_info.json"]),
        ("cifar", ["cifar-10-binary.tar.gz"], ["cifar-10-python.tar.gz", "cifar-100-binary.tar.gz", *CIFAR]),
        ("cifar", list(CIFAR), ["cifar-10-python.tar.gz"]),
        ("webdataset", ["0.tar", "b/1.TGZ"], ["0.json"]),
        ("imagenet21k", ["n01440764.tar", "more/n01443537.tar"], ["words.txt"]),
        ("imagenet21k", ["fall11_whole.tar"], []),
        ("folder", ["a/1.png", "notes.txt"], []),
    ],
)
def test_a_source_reads_these_files_and_leaves_the_others(kind: str, read: list[str], left: list[str]) -> None:
    assert [*chosen(source(kind), *read, *left)] == read
