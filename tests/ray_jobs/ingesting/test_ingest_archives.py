"""A folder as an archive or on S3, and groups by a column."""

import json
import os
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines import identity
from pipelines.files.sources import source_files
from pipelines.spec import FolderSource, Ingest, RecipeError
from ray_jobs.sources import catalog
from ray_jobs.sources.archives import containers
from ray_jobs.sources.archives.entries import Listing
from tests.support.archives import image, rar, tar, zipped
from tests.support.s3 import Server, used

IMAGES = {f"{name}/{i}.png": image(100 * len(name) + i, "PNG") for name in ("cat", "horse") for i in range(30)}
PACKERS: dict[str, Callable[[dict[str, bytes]], bytes]] = {
    "tar": tar,
    "tar.gz": lambda given: tar(given, "w:gz"),
    "zip": zipped,
    "rar": rar,
}


def source(root: Path | str, **fields: object) -> FolderSource:
    return FolderSource.model_validate({"kind": "folder", "root": str(root)} | fields)


def listed(root: Path | str, **fields: object) -> tuple[Listing, list[object]]:
    """What is there, and the images."""
    given = source(root, **fields)
    files = {name: str(path) for name, path in source_files(given).items()}
    found = catalog.listing(given, files)
    return found, list(catalog.images(given, files, found.entries))


def unpack(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def seen(found: tuple[Listing, list[object]]) -> list[tuple[object, ...]]:
    """All that a listing says but where the bytes lie."""
    listing, images = found
    return [
        (row["key"], row["label"], row["split"], row["group"], data)
        for row, data in zip(listing.entries.to_pylist(), images, strict=True)
    ]


@pytest.mark.parametrize("form", PACKERS)
@pytest.mark.parametrize("around", ["", "pets/", "data/pets/"])
def test_an_archive_is_as_the_folder_that_was_packed(form: str, around: str, tmp_path: Path) -> None:
    plain = listed(unpack(tmp_path / "plain", IMAGES))
    members = {around + name: data for name, data in IMAGES.items()} | {
        "README": b"",
        "__MACOSX/cat/._0.png": b"",
    }
    (tmp_path / "archive").write_bytes(PACKERS[form](members))
    packed = listed(tmp_path / "archive")
    assert seen(packed) == seen(plain) and packed[0].class_names == plain[0].class_names == ("cat", "horse")


def test_split_folders_and_a_table_in_archives(tmp_path: Path) -> None:
    splits = {f"train/{name}": data for name, data in IMAGES.items()}
    (tmp_path / "archive").write_bytes(tar({f"x/{name}": data for name, data in splits.items()}))
    assert set(listed(tmp_path / "archive")[0].entries["split"].to_pylist()) == {"train"}
    rows = [f"{name},{name.split('/')[0]},p{i % 7}" for i, name in enumerate(IMAGES)]
    table = "\n".join(["file_name,label,patient", *rows]).encode()
    (tmp_path / "archive").write_bytes(zipped({"x/metadata.csv": table} | {f"x/{n}": d for n, d in IMAGES.items()}))
    found, _ = listed(tmp_path / "archive", group="patient")
    groups = dict(zip(found.entries["key"].to_pylist(), found.entries["group"].to_pylist(), strict=True))
    assert groups == {name: f"p{i % 7}" for i, name in enumerate(IMAGES)}


@pytest.mark.parametrize("form", PACKERS)
@pytest.mark.parametrize("around", ["", "pets/"])
def test_tables_in_split_folders_of_archives(form: str, around: str, tmp_path: Path) -> None:
    files = {f"{split}/{i}.png": image(i, "PNG") for split in ("train", "test") for i in range(4)}
    lines = "\n".join(json.dumps({"file_name": f"{i}.png", "label": f"c{i % 2}"}) for i in range(4))
    rows = "\n".join(["file_name,label", *(f"{i}.png,c{i % 2}" for i in range(4))])
    files |= {"train/metadata.jsonl": lines.encode(), "test/metadata.csv": rows.encode()}
    plain = listed(unpack(tmp_path / "plain", files))
    (tmp_path / "archive").write_bytes(PACKERS[form]({around + name: data for name, data in files.items()}))
    packed = listed(tmp_path / "archive")
    assert seen(packed) == seen(plain) and not packed[0].notes
    assert Counter(packed[0].entries["split"].to_pylist()) == {"train": 4, "test": 4}


def test_what_is_refused_in_an_archive_is_listed(tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(tar(IMAGES | {"cat/../../x.png": b"1", "/etc/cat/2.png": b"2"}))
    found, _ = listed(tmp_path / "archive")
    assert len(found.entries) == 60 and {one.reason for one in found.unusable} == {"its path leads outside"}


def test_names_with_the_sign_of_a_chain_in_them(tmp_path: Path) -> None:
    few = {name.replace("/", "/a::"): data for name, data in list(IMAGES.items())[::20]}
    plain = listed(unpack(tmp_path / "plain", few))
    assert sorted(plain[1]) == sorted(few.values())
    (tmp_path / "x::y.zip").write_bytes(zipped(few))
    assert seen(listed(tmp_path / "x::y.zip")) == seen(plain)
    (tmp_path / "x::y.tar.gz").write_bytes(tar({"in.zip": zipped(few)}, "w:gz"))
    files = {"x::y.tar.gz": str(tmp_path / "x::y.tar.gz")}
    assert {member.path for member in containers.members(files, "x::y.tar.gz::in.zip")} == few.keys()


@pytest.mark.parametrize(("method", "name"), [(zipfile.ZIP_BZIP2, "bzip2"), (zipfile.ZIP_LZMA, "lzma")])
def test_a_zip_of_which_nothing_can_be_read_says_why(method: int, name: str, tmp_path: Path) -> None:
    (tmp_path / "it.zip").write_bytes(zipped(IMAGES, method))
    with pytest.raises(
        ValueError, match=rf"none of its 60 files can be used.* compressed by {name}: pack it with deflate"
    ):
        listed(tmp_path / "it.zip")


def test_coco_in_an_archive_is_told(tmp_path: Path) -> None:
    few = {"coco/train2017/1.jpg": b"", "coco/annotations/instances_train2017.json": b"{}"}
    (tmp_path / "it.zip").write_bytes(zipped(few))
    with pytest.raises(ValueError, match="the layout of COCO"):
        listed(tmp_path / "it.zip")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (None, "'patient' needs metadata.csv.*, but .* contains none"),
        ("file_name,label\n", "needs one column 'patient'"),
        ("file_name,label,patiend\n", "unknown column 'patiend': did you mean 'patient'"),
        ("file_name,label,patient\na/1.png,a,\n", "'a/1.png' has no patient"),
    ],
)
def test_a_group_that_is_not_there_is_told(table: str | None, message: str, tmp_path: Path) -> None:
    root = unpack(tmp_path, {"a/1.png": b"", "b/1.png": b""})
    if table is not None:
        (root / "metadata.csv").write_text(table)
    with pytest.raises(ValueError, match=message):
        listed(root, group="patient")


def test_a_folder_on_s3_is_as_the_folder_here(tmp_path: Path, moto: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: data for name, data in IMAGES.items() if name.endswith("1.png")}
    plain = unpack(tmp_path / "plain", few)
    bucket = f"folder-{os.urandom(4).hex()}"

    def fingerprint() -> str | None:
        return identity.source_fingerprint(Ingest(job="ingest", source=source(f"s3://{bucket}/pets")))

    with used(moto, monkeypatch):
        moto.client.create_bucket(Bucket=bucket)
        hidden = {"cat/.DS_Store": b"", "__MACOSX/cat/1.png": b"", "cat/": b""}
        for name, data in (few | hidden).items():
            moto.client.put_object(Bucket=bucket, Key=f"pets/{name}", Body=data)
        moto.client.put_object(Bucket=bucket, Key="pets2/dog/1.png", Body=b"another folder")
        assert seen(listed(f"s3://{bucket}/pets")) == seen(listed(plain))
        first = fingerprint()
        assert first == fingerprint()
        moto.client.put_object(Bucket=bucket, Key="pets/cat/1.png", Body=image(0, "PNG"))
        assert fingerprint() != first
        moto.client.put_object(Bucket=bucket, Key="pets.zip", Body=zipped({f"x/{n}": d for n, d in few.items()}))
        assert seen(listed(f"s3://{bucket}/pets.zip")) == seen(listed(plain))
        with pytest.raises(RecipeError, match="no such object or prefix"):
            listed(f"s3://{bucket}/nowhere")
        moto.client.put_object(Bucket=bucket, Key="bad/../x.png", Body=b"")
        with pytest.raises(RecipeError, match="which is not a valid path"):
            listed(f"s3://{bucket}/bad")
