"""RARs: volumes, links, what the library cannot read."""

import os
import time
from pathlib import Path

import pytest

from pipelines import identity
from pipelines.files.sources import source_files
from pipelines.spec import FolderSource, Ingest
from ray_jobs.sources import catalog
from ray_jobs.sources.archives import sandbox
from ray_jobs.sources.archives.containers import contents, members, read_member
from tests.support.archives import RAR_5_WITH_HARD_LINKS, RAR_202_WITH_COMMENT, image, rar_volumes, tar
from tests.support.archives import rar as packed
from tests.support.s3 import Server, used

CONTENT = {"a/1.jpg": b"first", "b/2.png": bytes(range(256)) * 20, "empty": b""}
IMAGES = {f"{name}/{i}.png": image(100 * len(name) + i, "PNG") for name in ("cat", "horse") for i in range(3)}
NEW, OLD = ("x.part1.rar", "x.part2.rar", "x.part3.rar"), ("x.rar", "x.r00", "x.r01")


def put(folder: Path, files: dict[str, bytes]) -> dict[str, str]:
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return {name: str(folder / name) for name in files}


def volumes(names: tuple[str, ...]) -> dict[str, bytes]:
    return dict(zip(names, rar_volumes(CONTENT, 2_000, old_names=names == OLD), strict=True))


@pytest.mark.parametrize("names", [NEW, OLD])
def test_volumes_are_one_archive(names: tuple[str, ...], tmp_path: Path) -> None:
    files = put(tmp_path, volumes(names))
    assert {one.path: read_member(files, one) for one in members(files, names[0])} == CONTENT


@pytest.mark.parametrize("names", [NEW, OLD])
@pytest.mark.parametrize("lost", [1, 2])
def test_a_missing_volume_is_named(names: tuple[str, ...], lost: int, tmp_path: Path) -> None:
    files = put(tmp_path, volumes(names))
    del files[names[lost]]  # it lies there all the same, and is in no key
    with pytest.raises(ValueError, match=rf"/{names[0]} is the first of several.* {names[lost]} is missing"):
        members(files, names[0])


def test_a_volume_in_a_tar_names_the_next(tmp_path: Path) -> None:
    files = put(tmp_path, {"it": tar({"in/x.part1.rar": volumes(NEW)["x.part1.rar"]})})
    with pytest.raises(ValueError, match=r"x\.part2\.rar is missing"):
        members(files, "it::in/x.part1.rar")


@pytest.mark.parametrize("later", NEW[1:])
def test_a_later_volume_is_not_taken_for_an_archive(later: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not the first volume"):
        members(put(tmp_path, volumes(NEW)), later)


def test_all_volumes_of_a_folder_source_are_in_its_key(
    tmp_path: Path, moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = dict(zip(NEW, rar_volumes(IMAGES, sum(map(len, IMAGES.values())) // 3 + 1), strict=True))
    put(tmp_path, data | {"x.txt": b"no volume"})
    bucket = f"rar-{os.urandom(4).hex()}"

    def keys_and_images(root: str) -> tuple[str | None, dict[str, object]]:
        source = FolderSource(kind="folder", root=root)
        files = {name: str(place) for name, place in source_files(source).items()}
        assert tuple(files) == NEW
        entries = catalog.listing(source, files).entries
        found = catalog.images(source, files, entries)
        fingerprint = identity.source_fingerprint(Ingest(job="ingest", source=source))
        return fingerprint, dict(zip(entries["key"].to_pylist(), found, strict=True))

    first, found = keys_and_images(str(tmp_path / NEW[0]))
    (tmp_path / NEW[2]).write_bytes(data[NEW[2]] + bytes(20))
    second, again = keys_and_images(str(tmp_path / NEW[0]))
    assert found == again == IMAGES and first != second
    with used(moto, monkeypatch):
        moto.client.create_bucket(Bucket=bucket)
        for name, content in data.items():
            moto.client.put_object(Bucket=bucket, Key=f"some/{name}", Body=content)
        assert keys_and_images(f"s3://{bucket}/some/{NEW[0]}")[1] == IMAGES


@pytest.mark.parametrize(
    ("data", "found", "refused"),
    [
        (
            packed({"link": b"a/1.jpg", "a/1.jpg": b"1", "./a/1.jpg": b"2"}, links={"link"}),
            {"a/1.jpg"},
            {"link": "it is a link", "a/1.jpg": "its path comes twice"},
        ),
        (RAR_5_WITH_HARD_LINKS, {"stest1.txt"}, {"stest2.txt": "it is a link", "stest3.txt": "it is a link"}),
    ],
)
def test_links_and_copies_are_refused_one_by_one(
    data: bytes, found: set[str], refused: dict[str, str], tmp_path: Path
) -> None:
    given = contents(put(tmp_path, {"it": data}), "it")
    assert {one.path for one in given.members} == found
    assert {one.key.removeprefix("it/"): one.reason for one in given.refused} == refused


def test_letters_beyond_16_bits_in_names(tmp_path: Path) -> None:
    (found,) = members(put(tmp_path, {"it": packed({"\U0001d400/é.jpg": b"x"})}), "it")
    assert found.path == "\U0001d400/é.jpg"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (packed(CONTENT, flags=0x80), "has encrypted file names: unpack it"),
        (packed(CONTENT, own_flags=0x04), "is encrypted: unpack it"),
        (
            packed(CONTENT, version=70),
            "was packed by a version of RAR that the library does not read: unpack it",
        ),
        (RAR_202_WITH_COMMENT, "was packed by RAR 1 or 2, with a comment"),
        (b"RE~^" + bytes(600), r"was packed by RAR 1\.4 or older"),
    ],
)
def test_what_the_library_does_not_read_has_its_own_sentence(data: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"/it {message}"):
        members(put(tmp_path, {"it": data}), "it")


@pytest.mark.slow
def test_a_reader_may_take_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is the library's, not that of whoever reads what it unpacks."""
    (tmp_path / "it").write_bytes(packed({"big": os.urandom(2**22)}))
    monkeypatch.setattr(sandbox, "SECONDS", 1)
    chunks = sandbox.converted("it", "rar", tmp_path / "it")
    first = next(chunks)
    time.sleep(3)  # the pipe is full long before
    assert len(first) + sum(map(len, chunks)) > 2**22
