"""Sources of records that lie on S3 are the same data sets as on disk."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from pipelines.files.sources import source_files
from pipelines.spec import CifarSource, HfParquetSource, Source, TfdsSource
from ray_jobs.sources import catalog
from tests.support.archives import image, tar
from tests.support.cifar import members
from tests.support.prepared import put_parquet, put_tfds
from tests.support.s3 import Server, used


def put(kind: str, root: Path) -> None:
    if kind == "hf_parquet":
        put_parquet(root / "train-00000-of-00001.parquet", [image(0), image(1), image(2)], [0, 1, 2])
    elif kind == "cifar":
        (root / "cifar-10-python.tar.gz").write_bytes(tar(members(10, "python"), "w:gz"))
    else:
        put_tfds(root, kind)


def made(kind: str, root: str) -> Source:
    if kind == "hf_parquet":
        return HfParquetSource(kind="hf_parquet", root=root)
    return CifarSource(kind="cifar", root=root) if kind == "cifar" else TfdsSource(kind="tfds", root=root)


def images(source: Source) -> Mapping[str, object]:
    files = {name: str(path) for name, path in source_files(source).items()}
    listing = catalog.listing(source, files)
    found = catalog.images(source, files, listing.entries)
    data = (each if isinstance(each, bytes) else each.tobytes() for each in found)
    return dict(zip(map(str, listing.entries.drop(["offset"]).to_pylist()), data, strict=True))


@pytest.mark.parametrize("kind", ["hf_parquet", "cifar", "tfrecord", "array_record"])
def test_on_s3_as_on_disk(kind: str, tmp_path: Path, moto: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    put(kind, tmp_path)
    bucket = f"records-{kind.replace('_', '-')}"
    with used(moto, monkeypatch):
        moto.client.create_bucket(Bucket=bucket)
        for path in tmp_path.iterdir():
            moto.client.put_object(Bucket=bucket, Key=f"data/{path.name}", Body=path.read_bytes())
        there = images(made(kind, f"s3://{bucket}/data"))
    assert there == images(made(kind, str(tmp_path))) and len(there) > 2
