"""A user's folder: the three layouts, what is refused and why."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.spec import FolderSource, RecipeError
from ray_jobs.sources.folder import Entry, listing, scan


def touch(root: Path, *keys: str) -> Path:
    for key in keys:
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(b"never opened by scan")
    return root


def metadata(root: Path, text: str) -> Path:
    (root / "metadata.csv").write_text(text)
    return root


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
        (
            ("train/a/1.png", "val/b/1.png", "val/c/1.png"),
            "'b' has no images in the train split, nor have 'c'",
        ),
    ],
)
def test_folders_that_cannot_be_used_say_why(tmp_path: Path, keys: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scan(touch(tmp_path, *keys))


def test_other_columns_are_nobodys_business_and_files_of_other_endings_are_told(tmp_path: Path) -> None:
    root = touch(tmp_path, "1.png", "2.png", "3.jfif", "4.jfif", "README")
    (root / "metadata.csv").write_text("file_name,label,age\n1.png,a,30\n2.png,b,x\n")
    found = listing(FolderSource(kind="folder", root=str(root)), {})
    assert len(found.entries) == 2
    assert found.notes == ("3 files are left out, being no images by their endings: .jfif 2, none 1",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("filename,label\n1.png,a\n2.png,b\n", "unknown column 'filename': did you mean 'file_name'"),
        ("file_name,label,Splits\n", "unknown column 'Splits': did you mean 'split'"),
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


def test_a_name_that_is_not_utf_8_is_told(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / os.fsdecode(b"\xff.png")).write_bytes(b"")
    with pytest.raises(RecipeError, match=r"\\udcff\.png' is not UTF-8"):
        list(FolderSource(kind="folder", root=str(tmp_path)).files())
