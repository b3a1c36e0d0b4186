"""Archives of every form: each member comes back from its range; what is hostile is refused and harms nothing."""

import bz2
import gzip
import io
import lzma
import os
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from pipelines.files.hashing import cache_folder
from ray_jobs.sources.archives import blobs, containers, headers
from ray_jobs.sources.archives.containers import contents, local, members, read, read_file, read_member
from ray_jobs.sources.archives.entries import place, table
from tests.support.archives import rar, tar, zipped
from tests.support.s3 import Server, faulty, used

CONTENT = {"a/1.jpg": b"first", "a/b/2.png": b"\0\1" * 5_000, "empty": b""}


def put(folder: Path, **data: bytes) -> dict[str, str]:
    """Files under names whose ending says nothing."""
    for name, content in data.items():
        (folder / name).write_bytes(content)
    return {name: str(folder / name) for name in data}


def read_all(files: Mapping[str, str], file: str) -> dict[str, bytes | ValueError]:
    """Content of every member, read both ways."""
    found = members(files, file)
    rows = [member._asdict() | {"key": member.path, "label": 0} for member in found]
    by_range = dict(zip((m.path for m in found), read(files, table(rows)), strict=True))
    assert by_range == {member.path: read_member(files, member) for member in found}
    return by_range


FORMS: dict[str, Callable[[Mapping[str, bytes]], bytes]] = {
    "ustar": lambda given: tar(given, form=tarfile.USTAR_FORMAT),
    "gnu": lambda given: tar({"long/" * 40 + "x": b"long"} | given, form=tarfile.GNU_FORMAT),
    "pax": lambda given: tar({"ü/" * 80 + "x": b"long"} | given, form=tarfile.PAX_FORMAT),
    "gz": lambda given: tar(given, "w:gz"),
    "bz2": lambda given: tar(given, "w:bz2"),
    "xz": lambda given: tar(given, "w:xz"),
    "stored zip": lambda given: zipped(given, zipfile.ZIP_STORED),
    "deflated zip": zipped,
    "rar": rar,
}


@pytest.mark.parametrize("form", FORMS)
def test_each_member_of_each_form_comes_back(form: str, tmp_path: Path) -> None:
    found = read_all(put(tmp_path, it=FORMS[form](CONTENT)), "it")
    assert found.items() >= CONTENT.items()
    assert {found[path] for path in found.keys() - CONTENT.keys()} <= {b"long"}


def test_ranges_of_nested_tars_lie_in_the_outermost_file(tmp_path: Path) -> None:
    inner = tar(CONTENT)
    files = put(tmp_path, outer=tar({"d/middle.tar": tar({"in.tar": inner}), "other": b"x"}))
    chain = "outer::d/middle.tar::in.tar"
    assert read_all(files, chain) == CONTENT
    assert {member.file for member in members(files, chain)} == {"outer"}
    assert local(files, chain).read_bytes() == inner


@pytest.mark.parametrize("use", [local, read_file, contents])
def test_a_stored_member_of_a_zip_is_compared_with_its_checksum(
    use: Callable[[Mapping[str, str], str], object], tmp_path: Path
) -> None:
    inner = tar({"1.jpg": b"image bytes"})
    whole = zipped({"in.tar": inner}, zipfile.ZIP_STORED)
    use(put(tmp_path, good=whole), "good::in.tar")
    flipped = bytearray(whole)
    flipped[whole.index(b"image bytes")] ^= 1
    with pytest.raises(ValueError, match=r"in\.tar(: | is damaged: )its bytes are not those"):
        use(put(tmp_path, it=bytes(flipped)), "it::in.tar")


@pytest.mark.parametrize("packed", [gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_packed_tar_in_a_zip(packed: Callable[[bytes], bytes], method: int, tmp_path: Path) -> None:
    files = put(tmp_path, it=zipped({"c/objects.tar.gz": packed(tar(CONTENT))}, method))
    assert read_all(files, "it::c/objects.tar.gz") == CONTENT
    assert read_file(files, "it::c/objects.tar.gz") == tar(CONTENT)


@pytest.mark.parametrize("packed", [gzip.compress, bz2.compress, lzma.compress])
def test_several_streams_are_one_file_and_none_is_lost(
    packed: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    padding = b"" if packed is bz2.compress else bytes(64)
    data = packed(b"one ") + padding + packed(b"two")
    monkeypatch.setattr(blobs, "_CHUNK", len(packed(b"one ") + padding))  # the second begins with a chunk
    assert read_file(put(tmp_path, it=data), "it") == b"one two"
    with pytest.raises(ValueError, match="truncated or damaged"):
        read_file(put(tmp_path, it=data + b"more"), "it")


def test_parts_of_a_split_zip_are_one(tmp_path: Path) -> None:
    data = zipped(CONTENT | {"big": os.urandom(2_000)})
    parts = {f"t.zip.{i + 1:03d}": data[i * 700 : (i + 1) * 700] for i in range(len(data) // 700 + 1)}
    files = put(tmp_path, **parts)
    assert read_all(files, "t.zip.001").items() >= CONTENT.items()
    assert local(files, "t.zip.001").read_bytes() == data
    lost = dict(files)
    lost.pop("t.zip.002")
    with pytest.raises(ValueError, match=r"t\.zip\.002 is missing"):
        members(lost, "t.zip.001")
    lost = dict(files)
    lost.popitem()
    with pytest.raises(ValueError, match=r"t\.zip\.001 is truncated.*last part missing"):
        members(lost, "t.zip.001")


def test_a_zip64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    data = zipped(CONTENT)
    assert b"PK\x06\x06" in data  # its directory's end is one of ZIP64
    assert read_all(put(tmp_path, it=data), "it") == CONTENT


def test_a_file_is_unpacked_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = put(tmp_path, it=gzip.compress(b"one"))
    first = local(files, "it")
    before = first.stat().st_mtime_ns
    assert first.read_bytes() == b"one" and local(files, "it") == first
    assert first.stat().st_mtime_ns == before and first.is_relative_to(cache_folder())
    files = put(tmp_path, it=gzip.compress(b"another"))
    assert local(files, "it").read_bytes() == b"another"


# ---- hostile and damaged


def member(name: str, kind: bytes, link: str = "") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(info)
    return file.getvalue()[:512]


def test_members_that_are_no_plain_files_inside_are_refused_one_by_one(tmp_path: Path) -> None:
    bad = (
        member("link", tarfile.SYMTYPE, "/etc/passwd")
        + member("hard", tarfile.LNKTYPE, "a/1.jpg")
        + member("device", tarfile.CHRTYPE)
        + member("pipe", tarfile.FIFOTYPE)
        + tar({"../up": b"1", "/absolute": b"2", "a/../../up": b"3", "d\udce4.jpg": b"4", "a\nb": b"5"})[: 512 * 10]
    )
    found = contents(put(tmp_path, it=bad + tar(CONTENT | {"./a/1.jpg": b"again"})), "it")
    assert {one.path for one in found.members} == set(CONTENT)
    reasons = {one.key.removeprefix("it/"): one.reason for one in found.refused}
    assert reasons == {
        "link": "it is a link",
        "hard": "it is a link",
        "device": "it is no regular file",
        "pipe": "it is no regular file",
        "../up": "its path leads outside",
        "/absolute": "its path leads outside",
        "a/../../up": "its path leads outside",
        "d\\udce4.jpg": "its name is not UTF-8, or has control characters, or is too long",
        "a\\nb": "its name is not UTF-8, or has control characters, or is too long",
        "a/1.jpg": "its path comes twice",
    }
    with pytest.raises(ValueError, match=r"it/link cannot be used: it is a link"):
        members({"it": str(tmp_path / "it")}, "it")


@pytest.mark.slow
def test_plain_headers_are_found_as_the_library_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every form, with headers mutated: the same members, or the same refusal."""
    rng = random.Random(0)
    for form in ("ustar", "gnu", "pax"):
        whole = FORMS[form](CONTENT | {f"{i:03d}/{'n' * i}.jpg": bytes(i * 37) for i in range(60)})
        for turn in range(300):
            data = bytearray(whole)
            for _ in range(turn > 0):
                data[rng.randrange(0, len(data) - 512, 512) + rng.randrange(512)] = rng.randrange(256)
            blob = blobs.open_blob(put(tmp_path, **{f"{form}{turn}": bytes(data)}).values())
            found = []
            for plain in (headers._plain_members, lambda *_: iter(())):
                monkeypatch.setattr(headers, "_plain_members", plain)
                try:
                    found.append(list(headers.listed(blob)))
                except ValueError as error:
                    found.append([str(error)])
                monkeypatch.undo()
            assert found[0] == found[1], (form, turn)


def test_hidden_files_and_shadows_are_left_out(tmp_path: Path) -> None:
    stray = {
        "__MACOSX/a/._1.jpg": b"",
        "a/._1.jpg": b"",
        ".DS_Store": b"",
        ".git/x": b"",
        "./": b"",
        "dir/": b"",
    }
    for form in ("gnu", "deflated zip"):
        data = FORMS[form](stray | {"x.jpg": b"x"})
        assert "x.jpg" in {m.path for m in members(put(tmp_path, it=data), "it")} <= {"x.jpg", "long/" * 40 + "x"}


def test_zip_members_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("fine", b"fine")
        archive.writestr("bz", b"x" * 100, zipfile.ZIP_BZIP2)
        archive.writestr("xz", b"x" * 100, zipfile.ZIP_LZMA)
        archive.writestr("../up", b"up")
        link = zipfile.ZipInfo("link")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
        archive.writestr("win\\dows.jpg", b"w")
        archive.writestr("secret", b"s")
    data = bytearray(file.getvalue())
    data[data.index(b"PK\1\2", data.rindex(b"win")) + 8] |= 1  # encrypted
    found = contents(put(tmp_path, it=bytes(data)), "it")
    assert {m.path for m in found.members} == {"fine", "win/dows.jpg"}
    assert {one.key.removeprefix("it/"): one.reason for one in found.refused} == {
        "bz": "it is compressed by bzip2: pack it with deflate, or as tar",
        "xz": "it is compressed by lzma: pack it with deflate, or as tar",
        "../up": "its path leads outside",
        "link": "it is a link, or no regular file",
        "secret": "it is encrypted",
    }


def test_a_zip_member_without_a_name_is_left_out(tmp_path: Path) -> None:
    data = zipped({"": b"nameless", "a": b"x"})
    assert read_all(put(tmp_path, it=data), "it") == {"a": b"x"}


@pytest.mark.parametrize("inside", [False, True])
def test_bytes_that_are_not_those_of_a_zips_checksum_are_not_taken(inside: bool, tmp_path: Path) -> None:
    """A bit that flipped in a photograph's pixels is none that a decoder sees."""
    content = {"flipped": b"\xff\xd8" + bytes(1000), "whole": b"other"}
    data = zipped(content, zipfile.ZIP_STORED).replace(bytes(500) + b"\0", bytes(500) + b"\1", 1)
    packed = zipped({"inner.zip": data}, zipfile.ZIP_DEFLATED) if inside else data
    file = "it::inner.zip" if inside else "it"
    files = put(tmp_path, it=packed)
    flipped, whole = members(files, file)
    rows = [place(member) | {"key": member.path, "label": 0} for member in (flipped, whole)]
    reason, other = read(files, table(rows))
    assert other == b"other" and isinstance(reason, ValueError)
    assert str(reason) == "its bytes are not those that its archive has the checksum of"
    with pytest.raises(ValueError, match=r"flipped: its bytes are not those"):
        read_member(files, flipped)


def test_an_archive_in_a_zip_is_checked_as_a_whole(tmp_path: Path) -> None:
    archive = tar({"a": b"x" * 1000})
    data = zipped({"inner.tar": archive}, zipfile.ZIP_DEFLATED)
    crc = struct.pack("<L", zlib.crc32(archive))
    assert data.count(crc) == 2
    with pytest.raises(ValueError, match=r"inner.tar is damaged: its bytes are not those"):
        members(put(tmp_path, it=data.replace(crc, b"\1\2\3\4")), "it::inner.tar")


def test_zip_members_that_overlap_are_refused(tmp_path: Path) -> None:
    data = bytearray(zipped({"a": b"x" * 1_000, "b": b"y" * 1_000}, zipfile.ZIP_STORED))
    second = data.index(b"PK\1\2", data.index(b"PK\1\2") + 4)
    data[second + 42 : second + 46] = struct.pack("<I", 0)  # the second's header is the first's
    with pytest.raises(ValueError, match="members overlap"):
        members(put(tmp_path, it=bytes(data)), "it")


@pytest.mark.parametrize("form", ["gnu", "gz", "bz2", "xz", "deflated zip", "rar"])
def test_what_is_truncated_is_refused_by_name(form: str, tmp_path: Path) -> None:
    data = FORMS[form](CONTENT | {"last": os.urandom(3_000)})
    data = data.rstrip(b"\0") if form == "gnu" else data
    for length in (len(data) - 300, len(data) // 2, 600):
        with pytest.raises(ValueError, match=r"/it .*(truncated|damaged)"):
            members(put(tmp_path, it=data[:length]), "it")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty or truncated"),
        (b"plain text", "is not a tar, zip or RAR: it begins with 70 6c 61"),
        (b"7z\xbc\xaf\x27\x1c" + bytes(600), "is a 7z archive.*pack it as zip or tar"),
        (b"x" * 2_000, "is not a tar, zip or RAR"),
    ],
)
def test_what_is_no_archive_says_so(data: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        members(put(tmp_path, it=data), "it")


def test_damage_between_members_is_not_the_end(tmp_path: Path) -> None:
    data = bytearray(tar({"a": b"1", "b": b"2", "c": b"3"}))
    data[1024 + 150] ^= 255  # in the checksum of the second header
    with pytest.raises(ValueError, match="no header at byte 1,024"):
        members(put(tmp_path, it=bytes(data)), "it")


def test_bombs_are_refused_before_they_fill_disk_or_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(blobs, "FREE_BYTES", 2**20)
    monkeypatch.setattr(containers, "FREE_BYTES", 2**20)
    monkeypatch.setattr(containers, "MAX_IMAGE_BYTES", 2**20)
    zeros = bytes(4 * 2**20)
    for packed in (gzip.compress(zeros), bz2.compress(zeros), lzma.compress(zeros)):
        with pytest.raises(ValueError, match="a bomb"):
            local(put(tmp_path, it=packed), "it")
    files = put(tmp_path, it=zipped({"inner.tar": zeros}))
    with pytest.raises(ValueError, match="a bomb"):
        members(files, "it::inner.tar")
    (only,) = members(files, "it")
    (answer,) = read(files, table([only._asdict() | {"key": "k", "label": 0}]))
    assert isinstance(answer, ValueError) and "a bomb" in str(answer)
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert not kept


def test_too_many_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_jobs.sources.archives.headers.MAX_MEMBERS", 2)
    for form in ("gnu", "deflated zip"):
        with pytest.raises(ValueError, match="more than 2 members"):
            members(put(tmp_path, it=FORMS[form](CONTENT)), "it")


def test_a_range_that_does_not_lie_in_its_file_is_that_entrys_error(tmp_path: Path) -> None:
    files = put(tmp_path, it=b"0123456789", packed=zipped({"a": b"x" * 100}))
    (found,) = members(files, "packed")
    rows = [
        {"file": "it", "offset": 8, "length": 5, "codec": "stored"},
        {"file": "it", "offset": 3, "length": 2, "codec": "stored"},
        {"file": "it", "offset": 0, "length": 9, "codec": "deflate"},
        {"file": "packed", "offset": found.offset, "length": found.length - 2, "codec": "deflate"},
        {"file": "nowhere", "offset": 0, "length": 1, "codec": "stored"},
    ]
    answers = list(read(files, table({"key": str(i), "label": 0} | row for i, row in enumerate(rows))))
    assert answers[1] == b"34"
    reasons = ["truncated", "", "damaged", "truncated", "no file 'nowhere'"]
    for answer, reason in zip(answers, reasons, strict=True):
        assert not reason or (isinstance(answer, ValueError) and reason in str(answer))


# ---- S3


@pytest.fixture
def bucket(moto: Server, monkeypatch: pytest.MonkeyPatch):
    with used(moto, monkeypatch):
        name = f"sources-{os.urandom(4).hex()}"
        moto.client.create_bucket(Bucket=name)
        yield (lambda key, data: moto.client.put_object(Bucket=name, Key=key, Body=data) and f"s3://{name}/{key}")


@pytest.mark.parametrize("form", ["gnu", "gz", "deflated zip"])
def test_archives_on_s3_are_read_by_ranges(form: str, bucket, tmp_path: Path) -> None:
    data = tar({"x/inner": FORMS[form](CONTENT), "big": os.urandom(3 * 2**20)})
    files = {"it": bucket("some/it", data)}
    assert read_all(files, "it::x/inner").items() >= CONTENT.items()
    assert read_all(files, "it").keys() == {"x/inner", "big"}
    assert local(files, "it").read_bytes() == data


def test_parts_on_s3(bucket) -> None:
    data = zipped(CONTENT)
    files = {
        f"z.{i + 1:02d}": bucket(f"z.{i + 1:02d}", data[i * 150 : (i + 1) * 150]) for i in range(len(data) // 150 + 1)
    }
    assert read_all(files, "z.01") == CONTENT


def test_an_object_that_is_an_image_takes_one_request(moto: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    name, images = f"sources-{os.urandom(4).hex()}", {f"{i}.jpg": bytes([i]) * 50_000 for i in range(4)}
    with faulty(moto) as (proxy, seen), used(seen, monkeypatch):
        moto.client.create_bucket(Bucket=name)
        for key, data in images.items():
            moto.client.put_object(Bucket=name, Key=key, Body=data)
        files = {key: f"s3://{name}/{key}" for key in images}
        rows = [
            {"key": key, "label": 0, "file": key, "offset": 0, "length": len(data), "codec": "stored"}
            for key, data in images.items()
        ]
        assert list(read(files, table(rows))) == list(images.values())
        assert len(proxy.asked("GET")) == len(images)


def test_an_object_that_changes_while_it_is_read_is_noticed(bucket) -> None:
    from pipelines.store import StoreError

    files = {"it": bucket("it", tar(CONTENT))}
    blob = blobs.open_blob(files.values())
    bucket("it", tar(CONTENT | {"more": b""}))
    with pytest.raises(StoreError, match="it"):
        blob.read(0, 10)
