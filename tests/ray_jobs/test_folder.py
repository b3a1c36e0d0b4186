"""A user's folder: the three layouts, what is refused and why, splits that stay, files that cannot be read."""

import io
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from ray_jobs.sources.folder import Entry, assign_splits, decode, scan
from vit_model.config import Preprocessing
from vit_model.preprocessing import load_image


def touch(root: Path, *keys: str) -> Path:
    for key in keys:
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(b"never opened by scan")
    return root


def metadata(root: Path, text: str) -> Path:
    (root / "metadata.csv").write_text(text)
    return root


def encoded(form: str, mode: str = "RGB", size: tuple[int, int] = (40, 30), **options) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, form, **options)
    return file.getvalue()


# ---- layouts


def test_class_folders(tmp_path: Path) -> None:
    listing = scan(
        touch(tmp_path, "dog/2.PNG", "cat/deep/1.jpg", "cat/.hidden.jpg", "cat/notes.txt", ".git/x.png")
    )
    assert listing.class_names == ("cat", "dog")
    assert listing.entries == (Entry("cat/deep/1.jpg", 0, None), Entry("dog/2.PNG", 1, None))
    assert listing.ignored == ("cat/notes.txt",) and listing.counts() == {"cat": 1, "dog": 1}


def test_split_folders_in_any_case(tmp_path: Path) -> None:
    keys = ("Training/a/1.png", "Training/b/2.png", "VALID/a/3.png", "test/b/4.png")
    listing = scan(touch(tmp_path, *keys))
    assert listing.class_names == ("a", "b")
    assert {entry.key: entry.split for entry in listing.entries} == dict(
        zip(keys, ("train", "train", "dev", "test"), strict=True)
    )


def test_metadata_csv(tmp_path: Path) -> None:
    touch(tmp_path, "1.png", "sub/2.png", "3.png")
    text = '\ufefffile_name,label,split\n1.png,"cat, small",train\nsub/2.png,dog,Training\n3.png,dog,validation\n'
    listing = scan(metadata(tmp_path, text))
    assert listing.class_names == ("cat, small", "dog")
    assert [entry.split for entry in listing.entries] == ["train", "dev", "train"]  # 1.png, 3.png, sub/2.png
    assert listing.ignored == ()


def test_scan_needs_the_standard_library_only(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.png", "b/1.png")
    code = (
        "import sys; from pathlib import Path; from ray_jobs.sources.folder import scan; scan(Path(sys.argv[1]));"
        "print([m for m in ('numpy', 'PIL', 'torch', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ((), "has no images"),
        (("a/readme.txt",), "has no images"),
        (("a/1.png", "a/2.png"), "only the class 'a'"),
        (("a/1.png", "2.png"), "outside class folders, such as '2.png'"),
        (
            ("train/a/1.png", "train/b/1.png", "cats/2.png"),
            r"mixes split folders \(train\) and others \(cats\)",
        ),
        (("val/a/1.png", "valid/b/1.png"), "two folders for one split: val, valid"),
        (("train/1.png", "train/2.png"), "put it into train/<class>/"),
        (("train/a/1.png", "train/b/1.png", "test/c/1.png"), "class 'c' has no images in the train split"),
    ],
)
def test_folders_that_cannot_be_used_say_why(tmp_path: Path, keys: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scan(touch(tmp_path, *keys))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("filename,label\n1.png,a\n2.png,b\n", "unknown column 'filename': did you mean 'file_name'"),
        ("file_name,label,zzz\n", "unknown column 'zzz': known are file_name, label, split"),
        ("file_name\n1.png\n", "needs one column 'label'"),
        ("", "needs one column 'file_name'"),
        ("file_name,label\n1.png\n", "row 2 has not as many fields"),
        ("file_name,label\n1.png,a,b\n", "row 2 has not as many fields"),
        ("file_name,label\n../1.png,a\n", r"row 2: file_name '../1.png' must be a path inside"),
        ("file_name,label\n/etc/1.png,a\n", "must be a path inside"),
        ("file_name,label\n..\\1.png,a\n", "must be a path inside"),
        ("file_name,label\n9.png,a\n", "row 2: '9.png' is not an image in"),
        ("file_name,label\n1.png,a\n./1.png,b\n", "row 3: '1.png' is listed twice"),
        ("file_name,label\n1.png,\n", "'1.png' has no label"),
        ("file_name,label\n1.png,a\n", "does not list 1 of 2 images, such as '2.png'"),
        ("file_name,label,split\n1.png,a,holdout\n", "row 2: split 'holdout' is none of train"),
        ('file_name,label\n"1.png,a\n', "is not CSV"),
    ],
)
def test_metadata_that_cannot_be_used_says_why(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scan(metadata(touch(tmp_path, "1.png", "2.png"), text))


def test_links_that_lead_outside_are_refused(tmp_path: Path) -> None:
    outside = touch(tmp_path / "outside", "secret.png")
    root = touch(tmp_path / "root", "a/1.png", "b/1.png")
    (root / "b" / "inside.png").symlink_to(root / "a" / "1.png")
    assert len(scan(root).entries) == 3
    (root / "b" / "2.png").symlink_to(outside / "secret.png")
    with pytest.raises(ValueError, match="leads outside"):
        scan(root)
    (root / "b" / "2.png").unlink()
    (root / "c").symlink_to(outside)
    with pytest.raises(ValueError, match="link to a folder"):
        scan(root)


# ---- splits


def unsplit(sizes: list[int]) -> tuple[list[Entry], list[str]]:
    entries = [
        Entry(f"{label}/{i}.png", label, None) for label, size in enumerate(sizes) for i in range(size)
    ]
    return entries, [f"content of {entry.key}" for entry in entries]


@given(st.lists(st.integers(1, 12), min_size=2, max_size=5), st.text(max_size=3))
def test_every_class_of_three_has_a_train_and_a_test_image(sizes: list[int], salt: str) -> None:
    entries, ids = unsplit(sizes)
    splits = assign_splits(entries, ids, salt)
    for label, size in enumerate(sizes):
        of_class = {split for split, entry in zip(splits, entries, strict=True) if entry.label == label}
        assert size < 3 or {"train", "test"} <= of_class


def test_shares_are_about_70_10_20() -> None:
    splits = assign_splits(*unsplit([2000, 2000]), "s")
    shares = [splits.count(split) / 4000 for split in ("train", "dev", "test")]
    np.testing.assert_allclose(shares, [0.7, 0.1, 0.2], atol=0.025)


def test_adding_renaming_and_reordering_images_moves_none() -> None:
    entries, ids = unsplit([100, 100])
    before = dict(zip(ids, assign_splits(entries, ids, "s"), strict=True))
    more, more_ids = unsplit([300, 150])
    renamed = [entry._replace(key=f"new/{entry.key}") for entry in more][::-1]
    after = dict(zip(more_ids[::-1], assign_splits(renamed, more_ids[::-1], "s"), strict=True))
    assert before.items() <= after.items()


def test_copies_of_an_image_share_a_split() -> None:
    entries, ids = unsplit([200, 50])
    copies = [identity.rsplit("/", 1)[0] + str(i % 20) for i, identity in enumerate(ids)]
    splits = assign_splits(entries, copies, "s")
    assert len({(c, e.label, s) for c, e, s in zip(copies, entries, splits, strict=True)}) == len(
        {(c, e.label) for c, e in zip(copies, entries, strict=True)}
    )


def test_given_splits_stay_and_a_missing_dev_comes_from_train() -> None:
    entries, ids = unsplit([300, 300])
    entries = [entry._replace(split="test" if i % 5 == 0 else "train") for i, entry in enumerate(entries)]
    splits = assign_splits(entries, ids, "s")
    moved = [(e.split, split) for e, split in zip(entries, splits, strict=True) if e.split != split]
    assert set(moved) == {("train", "dev")} and 0.05 < len(moved) / 480 < 0.15


# ---- decoding


@pytest.mark.parametrize(
    ("form", "mode", "channels"), [("JPEG", "RGB", 3), ("JPEG", "L", 1), ("PNG", "P", 3), ("PNG", "1", 1),
                                   ("WEBP", "RGB", 3), ("BMP", "L", 1), ("TIFF", "RGB", 3), ("GIF", "P", 3)]
)  # fmt: skip
def test_decode_tells_what_an_image_is(form: str, mode: str, channels: int, tmp_path: Path) -> None:
    data = encoded(form, mode)
    assert decode(data) == (form.lower(), 40, 30, channels)
    (tmp_path / "x").write_bytes(data)
    assert decode(tmp_path / "x") == decode(data)


def png_claiming(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


def sixteen_bits() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty file"),
        (b"hello, I am a text", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        (encoded("JPEG")[:-200], "truncated"),
        (encoded("PNG")[:-200], "truncated"),
        (encoded("PNG")[:50] + b"\0" * 100 + encoded("PNG")[150:], "damaged"),
        (png_claiming(9_000, 9_000), r"too many pixels \(bomb\)"),
        (png_claiming(12_000, 12_000), r"too many pixels \(bomb\)"),
        (png_claiming(100_000, 100_000), r"too many pixels \(bomb\)"),
        (sixteen_bits(), "not 8 bits a channel"),
    ],
)
def test_decode_gives_a_short_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}$"):
        decode(data)


def test_decode_reports_the_upright_size() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    assert decode(encoded("JPEG", exif=exif)) == ("jpeg", 30, 40, 3)


def test_what_decode_passes_training_can_load() -> None:
    preprocessing = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, resolution=16, channels=3)
    good = encoded("JPEG")
    rng = np.random.default_rng(1)
    for _ in range(100):
        data = bytearray(good)
        for place in rng.integers(0, len(data), 3):
            data[place] = rng.integers(256)
        try:
            decode(bytes(data))
        except ValueError:
            continue
        assert load_image(bytes(data), preprocessing).shape == (16, 16, 3)
