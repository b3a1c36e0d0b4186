"""A user's folder: the three layouts, what is refused and why."""

import os
import socket
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines import identity
from pipelines.files.digests import file_digests
from pipelines.files.sources import source_files
from pipelines.identity import identity_fields
from pipelines.spec import FolderSource, Ingest, RecipeError
from ray_jobs.data.columns import SEVERAL
from ray_jobs.sources.archives import entries
from ray_jobs.sources.archives.roots import in_folder
from ray_jobs.sources.readers.folder import EXTENSIONS, Entry, Listing, arrange, listing
from ray_jobs.sources.readers.label_tables import IMAGEFOLDER, Columns, check_tables
from ray_jobs.sources.readers.misread import check_not_joined
from vit_model.errors import UserError


def touch(root: Path, *keys: str) -> Path:
    for key in keys:
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(b"never opened by scan")
    return root


def metadata(root: Path, text: str, name: str = "metadata.csv") -> Path:
    (root / name).write_text(text)
    return root


def scan(root: Path, columns: Columns = IMAGEFOLDER) -> Listing:
    """The images of a folder, as `listing` arranges them."""
    files, _ = in_folder(root)
    tables = {key: (root / key).read_bytes() for key in check_tables(root, files, EXTENSIONS)}
    return arrange(root, files, tables, columns)


def listed(source: FolderSource) -> entries.Listing:
    return listing(source, {name: str(place) for name, place in source_files(source).items()})


def of_keys(found: Listing) -> dict[str, tuple[str, str | None]]:
    """(class, split) of each image."""
    return {entry.key: (found.class_names[entry.label], entry.split) for entry in found.entries}


# ---- layouts


def test_class_folders(tmp_path: Path) -> None:
    listing = scan(touch(tmp_path, "dog/2.PNG", "cat/deep/1.jpg", "cat/.hidden.jpg", "cat/notes.txt", ".git/x.png"))
    assert listing.class_names == ("cat", "dog")
    assert listing.entries == (Entry("cat/deep/1.jpg", 0, None), Entry("dog/2.PNG", 1, None))
    assert listing.notes == ("1 folder inside class folders, whose images have the outer folder's class: cat/deep",)
    assert listing.ignored == ("cat/notes.txt",) and [entry.label for entry in listing.entries] == [0, 1]


def test_versions_of_images_as_classes_are_told_and_numbered_images_are_not(tmp_path: Path) -> None:
    [note] = scan(touch(tmp_path / "a", *(f"{name}/{n}.png" for name in ("rgb", "depth") for n in ("x1", "x2")))).notes
    assert note.startswith("all classes have images of the same names, such as x1")
    assert not scan(touch(tmp_path / "b", *(f"{name}/{n}.png" for name in ("cat", "dog") for n in ("1", "2")))).notes


def test_versions_of_one_image_that_a_draw_would_separate_are_told(tmp_path: Path) -> None:
    touch(tmp_path, "train/a/1_jpg.rf.01.jpg", "train/a/1_jpg.rf.02.jpg", "train/b/2.jpg", "valid/b/3.jpg")
    source = FolderSource(kind="folder", root=str(tmp_path))
    assert listed(source).notes[0].startswith("Roboflow's versions of 1 image (train/a/1_jpg.rf.*): a draw puts")
    touch(tmp_path, "test/a/4.jpg")
    assert not listed(source).notes


def test_split_folders_in_any_case(tmp_path: Path) -> None:
    keys = ("Training/a/1.png", "Training/b/2.png", "VALID/a/3.png", "test/b/4.png")
    listing = scan(touch(tmp_path, *keys))
    assert listing.class_names == ("a", "b")
    assert {entry.key: entry.split for entry in listing.entries} == dict(
        zip(keys, ("train", "train", "dev", "test"), strict=True)
    )


@pytest.mark.parametrize(
    "tops",
    [
        ("seg_train/seg_train", "seg_test/seg_test"),
        ("training_set", "holdout"),
        ("train_images", "val_images", "Test images"),
        ("train2", "eval"),
        ("TrainData", "TestData"),
    ],
)
def test_top_folders_that_contain_splits_are_no_classes(tops: tuple[str, ...], tmp_path: Path) -> None:
    found = scan(touch(tmp_path, *(f"{top}/{name}/1.png" for top in tops for name in ("forest", "sea"))))
    assert found.class_names == ("forest", "sea")
    splits = {entry.key.partition("/")[0]: entry.split for entry in found.entries}
    expected = ("train", "test") if len(tops) == 2 else ("train", "dev", "test")
    assert tuple(splits[top.partition("/")[0]] for top in tops) == expected


@pytest.mark.parametrize("tops", [("bullet_train", "cat"), ("test_tube", "val_set"), ("bullet_train", "x_y")])
def test_classes_may_contain_the_name_of_a_split(tops: tuple[str, ...], tmp_path: Path) -> None:
    found = scan(touch(tmp_path, *(f"{top}/1.png" for top in tops)))
    assert found.class_names == tops and {entry.split for entry in found.entries} == {None}


WITHOUT = Columns(label=None)


def test_without_labels_images_are_anywhere_and_in_train(tmp_path: Path) -> None:
    found = scan(touch(tmp_path, "1.png", "cat/2.png", "cat/deep/3.JPG", "notes.txt"), WITHOUT)
    assert found.class_names == () and found.ignored == ("notes.txt",)
    assert found.entries == tuple(Entry(key, 0, "train") for key in ("1.png", "cat/2.png", "cat/deep/3.JPG"))


def test_without_labels_splits_and_groups_are_still_read(tmp_path: Path) -> None:
    folders = scan(touch(tmp_path / "a", "train/1.png", "train/x/2.png", "test/3.png"), WITHOUT)
    assert [entry.split for entry in folders.entries] == ["test", "train", "train"]
    touch(tmp_path / "b", "1.png", "2.png")
    metadata(tmp_path / "b", "file_name,site,split\n1.png,p1,train\n2.png,p2,test\n")
    table = scan(tmp_path / "b", Columns(label=None, group="site"))
    assert [(entry.split, entry.group) for entry in table.entries] == [("train", "p1"), ("test", "p2")]
    with pytest.raises(UserError, match=r"some images have a split, others do not, such as 'x/4\.png'"):
        scan(touch(tmp_path / "a", "x/4.png"), WITHOUT)
    with pytest.raises(UserError, match="cat contains split folders"):
        scan(touch(tmp_path / "c", "cat/train/1.png", "cat/test/2.png"), WITHOUT)


def test_two_spellings_of_one_word_are_one_class(tmp_path: Path) -> None:
    """macOS writes names in Unicode's NFD, others in NFC. A single spelling stays as it is."""
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    found = scan(touch(tmp_path, f"train/{decomposed}/1.png", "train/tea/1.png", f"test/{decomposed}/2.png"))
    assert found.class_names == (decomposed, "tea")
    found = scan(touch(tmp_path, f"test/{composed}/3.png"))
    assert found.class_names == (composed, "tea")
    assert [entry.label for entry in found.entries] == [0, 0, 0, 1]


def test_metadata_csv(tmp_path: Path) -> None:
    touch(tmp_path, "1.png", "sub/2.png", "3.png")
    text = '\ufefffile_name,label,split\n1.png,"cat, small",train\nsub/2.png,dog,Training\n3.png,dog,validation\n'
    listing = scan(metadata(tmp_path, text))
    assert listing.class_names == ("cat, small", "dog")
    assert [entry.split for entry in listing.entries] == ["train", "dev", "train"]  # 1.png, 3.png, sub/2.png
    assert listing.ignored == ()


def test_tables_in_split_folders_name_files_from_there(tmp_path: Path) -> None:
    """As Hugging Face's imagefolder has them; CSV and JSON lines may stand side by side."""
    touch(tmp_path, "train/1.png", "train/deep/2.png", "Test/1.png", "validation/x.png")
    metadata(tmp_path, "file_name,label\n1.png,0\ndeep/2.png,true\n", "train/metadata.csv")
    lines = '{"file_name": "1.png", "label": true, "text": null}\n\n'
    metadata(tmp_path, lines, "Test/metadata.jsonl")
    metadata(tmp_path, '{"file_name":"x.png","label":0}', "validation/metadata.jsonl")
    found = scan(tmp_path)
    assert of_keys(found) == {
        "Test/1.png": ("true", "test"),
        "train/1.png": ("0", "train"),
        "train/deep/2.png": ("true", "train"),
        "validation/x.png": ("0", "dev"),
    }
    assert found.ignored == ()


def test_a_table_in_the_root_leaves_the_split_to_split_folders_or_says_it(tmp_path: Path) -> None:
    touch(tmp_path, "train/1.png", "train/2.png", "test/3.png")
    metadata(tmp_path, "file_name,label\ntrain/1.png,a\ntrain/2.png,b\ntest/3.png,b\n")
    assert [split for _, split in of_keys(scan(tmp_path)).values()] == ["test", "train", "train"]
    metadata(tmp_path, "file_name,label,split\ntrain/1.png,a,train\ntrain/2.png,b,dev\ntest/3.png,b,train\n")
    assert [split for _, split in of_keys(scan(tmp_path)).values()] == ["train", "train", "dev"]
    touch(tmp_path, "more/4.png")
    metadata(tmp_path, "file_name,label\ntrain/1.png,a\ntrain/2.png,b\ntest/3.png,b\nmore/4.png,a\n")
    with pytest.raises(ValueError, match=r"some images have a split, others do not, such as 'more/4\.png'"):
        scan(tmp_path)


def test_tables_are_read_wherever_they_are(tmp_path: Path) -> None:
    """As `datasets` reads them. Folders would be the labels otherwise."""
    touch(tmp_path, "siteA/x/1.png", "siteB/2.png", "siteB/3.png")
    metadata(tmp_path, "file_name,label\nx/1.png,cat\n", "siteA/metadata.csv")
    pq.write_table(
        pa.table({"file_name": ["2.png", "3.png"], "label": pa.array(["dog", "cat"]).dictionary_encode()}),
        tmp_path / "siteB" / "metadata.parquet",
    )
    found = scan(tmp_path)
    assert [label for label, _ in of_keys(found).values()] == ["cat", "dog", "cat"] and not found.ignored
    (tmp_path / "siteB" / "metadata.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"siteB/metadata\.parquet is not a Parquet file, or damaged"):
        scan(tmp_path)


def test_tables_are_checked_together_for_splits_and_for_subjects_with_several_images(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.png", "a/2.png", "b/3.png")
    metadata(tmp_path, "file_name,label,PatientID,part\n1.png,x,p1,train\n2.png,y,p2,train\n", "a/metadata.csv")
    metadata(tmp_path, "file_name,label,PatientID,part\n3.png,x,p1,test\n", "b/metadata.csv")
    with pytest.raises(UserError, match=r"the column 'part' names splits \(test, train\)"):
        scan(tmp_path)
    for folder in "ab":
        table = (tmp_path / folder / "metadata.csv").read_text()
        metadata(tmp_path, table.replace("part", "phase").replace("test", "train"), f"{folder}/metadata.csv")
    [note] = scan(tmp_path).notes
    assert note.startswith("column 'PatientID' has 2 values for 3 images; with source.group: PatientID, the images of")
    assert not scan(tmp_path, Columns(group="PatientID")).notes


@pytest.mark.parametrize("name", ["metadata.json", "a/Metadata.csv", "metadata.tsv", "b/metadata.csv.gz"])
def test_a_table_that_is_not_read_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{name} is not a table that can be read; expected metadata.csv"):
        scan(touch(tmp_path, "a/1.png", "b/2.png", "a/metadata.png", name))


def test_columns_are_named_and_white_space_around_text_is_nothing(tmp_path: Path) -> None:
    touch(tmp_path, "1.png", "2.png", "3.png")
    text = ' image ,\tclass, label , split\n 1.png , cat,0, train \n2.png,"cat ",1,train\n3.png , "dog, big",2, train\n'
    root = str(metadata(tmp_path, text))
    source = FolderSource(kind="folder", root=root, image_column="image", label_column="class")
    found = listed(source)
    assert found.class_names == ("cat", "dog, big") and found.entries["label"].to_pylist() == [0, 0, 1]
    metadata(tmp_path, '{" image": " 1.png", "class": "cat"}\n{"image": "2.png", "class": 7}\n', "metadata.jsonl")
    metadata(tmp_path, "image,class\n3.png,7\n")
    assert listed(source).class_names == ("7", "cat")
    (tmp_path / "metadata.csv").unlink()
    with pytest.raises(ValueError, match=r"metadata\.jsonl does not list 1 of 3 images, such as '3\.png'"):
        listed(source)
    (tmp_path / "metadata.jsonl").unlink()
    with pytest.raises(
        ValueError, match=r"image_column: 'image' needs metadata\.csv, .* or metadata\.parquet, but .* contains none"
    ):
        listed(source)


def test_a_column_may_differ_in_case_and_byte_order_marks(tmp_path: Path) -> None:
    """An exact column wins over one that differs in case."""
    touch(tmp_path, "1.png", "2.png")
    text = '\ufeff"\ufeffFile_Name",LABEL ,Split\n1.png,a,train\n2.png,b,train\n'
    found = scan(metadata(tmp_path, text))
    assert (found.class_names, [entry.split for entry in found.entries]) == (("a", "b"), ["train", "train"])
    assert scan(metadata(tmp_path, "file_name,label,Label\n1.png,a,x\n2.png,b,y\n")).class_names == ("a", "b")


@pytest.mark.parametrize(
    ("table", "cells", "separator"),
    [
        ("metadata.csv", ("b; a ;b", "", "c", "a"), ";"),
        ("metadata.csv", ('"[""b"", ""a"", ""b""]"', "[]", "c", "['a']"), None),
        ("metadata.jsonl", ('["b", "a", "b"]', "[]", '"c"', '["a"]'), None),
    ],
)
def test_an_image_has_several_labels_or_none(
    table: str, cells: tuple[str, ...], separator: str | None, tmp_path: Path
) -> None:
    """Each label once, in the order of the classes; a comma in a class is no separator."""
    touch(tmp_path, *(f"{number}.png" for number in range(4)))
    row = {"metadata.csv": "{}.png,{}", "metadata.jsonl": '{{"file_name": "{}.png", "label": {}}}'}[table]
    head = ["file_name,label"] if table.endswith("csv") else []
    metadata(tmp_path, "\n".join([*head, *(row.format(*each) for each in enumerate(cells))]), table)
    found = scan(tmp_path, Columns(multi_label=True, separator=separator))
    assert found.class_names == ("a", "b", "c")
    assert [(entry.label, entry.labels) for entry in found.entries] == [
        (SEVERAL, [0, 1]),
        (SEVERAL, []),
        (SEVERAL, [2]),
        (SEVERAL, [0]),
    ]


def test_fields_that_came_later_are_not_in_old_keys() -> None:
    plain = FolderSource(kind="folder", root="/images")
    assert identity_fields(plain).keys() == {"kind", "name", "salt"}
    named = plain.model_copy(update={"label_column": "class"})
    assert identity_fields(named)["label_column"] == "class"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ((), "has no images"),
        (("a/readme.txt",), "has no images"),
        (("train-images-idx3-ubyte.gz", "x.parquet"), "Read such files with source.kind: 'hf_parquet' or 'idx'"),
        (
            ("a/1.png", "a/2.png"),
            "only the class 'a': a classifier needs two classes or more. If the images have no labels, set",
        ),
        (("pets/cat/1.png", "pets/dog/2.png"), r"only the class 'pets'.*set the root to .*/pets$"),
        (("pets/train/cat/1.png", "pets/train/dog/2.png"), r"only the class 'pets'.*set the root to .*/pets$"),
        (("cat/1.png", "dog/2.HEIC"), "Its files are .png 1, .heic 1; to use the .heic files, convert"),
        (("train/Images/0/1.png", "test/Images/2.png"), r"only the class 'Images'.*the folders in it, move them up$"),
        (
            ("annotations/instances_train2017.json", "train2017/1.jpg", "val2017/2.jpg"),
            r"the layout of COCO, a detection data set \(annotations/instances_train2017.json\).*one label",
        ),
        (("train2017/1.jpg", "val2017/2.jpg"), r"the layout of COCO, a detection data set \(train2017\)"),
        (("train/_annotations.coco.json", "train/1.jpg", "valid/2.jpg"), "the layout of COCO"),
        (("a/images/1.png", "a/masks/1.png", "b/images/1.png"), r"a segmentation data set \(a/images, a/masks\)"),
        (("a/images_png/1.png", "a/masks_png/1.png", "b/c/1.png"), "the layout of a segmentation data set"),
        (("cat/1.png", "cat_masks/1.png"), "the layout of a segmentation data set"),
        (("images/1.png", "masks/1.png"), r"the layout of a segmentation data set \(images, masks\)"),
        (("train/img/1.png", "train/labels/1.png"), "the layout of a segmentation data set"),
        (
            ("images/1.png", "masks/1.png", "more/1.png"),
            r"the layout of a segmentation data set \(images, masks, more\)",
        ),
        (("Original/1.png", "Ground Truth/1.png"), r"a segmentation data set \(Ground Truth, Original\)"),
        (("train/images/1.png", "train/targets/1_target.png"), "the layout of a segmentation data set"),
        (("Task1_Training_Input/1.jpg", "Task1_Training_GroundTruth/1.png"), "the layout of a segmentation data set"),
        (("leftImg8bit/train/x/1.png", "gtFine/train/x/1.png"), "the layout of a segmentation data set"),
        (("JPEGImages/1.jpg", "SegmentationClass/1.png"), "the layout of a segmentation data set"),
        (("train/1_sat.jpg", "train/1_mask.png"), "such as train/1_mask.png of train/1_sat.jpg. Remove"),
        (("x_json/img.png", "x_json/label.png", "y_json/img.png"), "x_json/label.png of x_json/img.png. Remove"),
        (
            ("VOC2007/JPEGImages/1.jpg", "VOC2007/SegmentationClass/1.png", "VOC2012/JPEGImages/2.jpg"),
            "the layout of a segmentation data set",
        ),
        (
            ("a/1.png", "a/1_mask.png", "b/2.png", "b/2_mask_1.png"),
            "2 images .* such as a/1_mask.png of a/1.png. Remove or rename",
        ),
        (
            ("seg_train/a/1.png", "seg_train/b/1.png", "seg_test/a/2.png", "seg_pred/3.png"),
            r"seg_test and seg_train name splits, but not seg_pred. Move others out; or",
        ),
        (
            ("cat/train/1.png", "cat/test/2.png", "dog/train/1.png", "dog/test/2.png"),
            r"cat, dog contain split folders \(test, train\)\. Set the root to one of these folders",
        ),
        (("my_train/train/a/1.png", "my_train/test/b/1.png"), r"my_train contains split folders \(test, train\)"),
        (("a/1.png", "2.png"), "outside class folders, such as '2.png'.* set source.labels: false"),
        (
            ("labels.csv", "1.png"),
            "labels: false. labels.csv is not read: if it lists labels or splits, write them into a metadata.csv",
        ),
        (
            ("images/1.png", "train.csv", "test.csv", "meta/val_list.txt"),
            "only the class 'images'.* meta/val_list.txt, test.csv, train.csv are not read: if they list",
        ),
        (
            ("cells/sick/1.png", "sick/1.png", "well/2.png"),
            "class folder cells contains folders named like other classes: cells/sick. Remove copies, or",
        ),
        (("cat/1.png", "dog/2.png", "no_label/3.png"), "'no_label' looks like a mark for images without a label"),
        (("train/a/1.png", "train/Unlabeled/2.png"), "'Unlabeled' looks like a mark for images without a label"),
        (("ham_part_1/1.png", "ham_part_2/2.png"), "ham_part_1, ham_part_2 look like parts of one dataset"),
        (
            ("00/palm/1.png", "00/fist/2.png", "01/palm/3.png", "01/fist/4.png"),
            r"00, 01 contain the same folders \(fist, palm\), so either level could be the classes",
        ),
        (
            [f"{form}/{leaf}/1.png" for form in ("color", "grayscale", "segmented") for leaf in ("scab", "rust")],
            r"color, grayscale, segmented contain the same folders \(rust, scab\).* Set the root to one of the outer",
        ),
        (
            ("a/abbey/1.png", "a/alley/out/1.png", "b/bar/2.png"),
            "a, b are the first letters of the folders in them, such",
        ),
        (("lung_sets/a/1.png", "colon_sets/b/2.png", "colon_sets/c/2.png"), "look like parts of one dataset"),
        (("ds0/img/1.png", "ds1/img/2.png"), "ds0, ds1 look like parts of one dataset"),
        (
            ("train/1.png", "train_labels/1.png", "val/2.png", "val_labels/2.png"),
            "the layout of a segmentation data set",
        ),
        (
            ("train/a/1.png", "train/b/1.png", "cats/2.png"),
            r"mixes split folders \(train\) and other folders \(cats\).* if these are classes, rename the first",
        ),
        (("trainA/1.png", "testA/1.png", "trainB/1.png", "testB/1.png"), "two folders for one split: testA, testB"),
        (("val/a/1.png", "valid/b/1.png"), "two folders for one split: val, valid"),
        (("train/1.png", "train/2.png"), "move it to train/<class>/. If the images have no labels, set"),
        (("train/1.png", "train/_classes.csv"), "labels: false. train/_classes.csv is not read: if it lists labels"),
        (("train/a/1.png", "train/b/2.png", "test/3.png"), "test/<class>/. If test has no labels, move it out"),
        (("train/a/1.png", "train/b/1.png", "test/c/1.png"), "train split has no images of these classes: 'c'"),
        (("train/a/1.png", "val/b/1.png", "val/c/1.png"), "train split has no images of these classes: 'b', 'c'"),
    ],
)
def test_folders_that_cannot_be_used_say_why(tmp_path: Path, keys: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scan(touch(tmp_path, *keys))


def test_other_columns_are_nobodys_business_and_files_of_other_endings_are_told(tmp_path: Path) -> None:
    root = touch(tmp_path, "1.png", "2.png", "3.heic", "4.HEIC", "README")
    (root / "metadata.csv").write_text("file_name,label,age,labels,file_name2\n1.png,a,30,[1],x\n2.png,[b],x,[2],y\n")
    found = listed(FolderSource(kind="folder", root=str(root)))
    assert len(found.entries) == 2
    assert found.notes == (
        "3 files left out, not images by their extensions: .heic 2, none 1; "
        "to use the .heic files, convert them to JPEG or PNG",
    )


@pytest.mark.parametrize(
    ("classes", "alike"),
    [
        (("Animals", "animals", "food"), "'Animals' and 'animals'"),
        (("road signs", "road_signs", "Road-Signs", "x"), "'Road-Signs' and 'road signs' and 'road_signs'"),
        (("cat", "cats", "A", "a", "-", "_"), None),
    ],
)
def test_names_that_are_likely_of_one_class_are_told(
    classes: tuple[str, ...], alike: str | None, tmp_path: Path
) -> None:
    root = touch(tmp_path, *(f"{name}/1.png" for name in classes))
    found = listed(FolderSource(kind="folder", root=str(root)))
    assert len(found.class_names) == len(classes), "they stay classes of their own"
    assert [alike in note for note in found.notes] == [True] if alike else not found.notes


def test_a_folder_of_images_that_are_not_read_says_which_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"has no images .*3 files: \.heic 2, none 1; to use the \.heic files, convert"
    ):
        scan(touch(tmp_path, "a/1.heic", "b/2.heic", "README"))


def test_what_systems_leave_is_no_class_and_no_noise(tmp_path: Path) -> None:
    left = (
        "@eaDir/1.jpg/SYNOPHOTO_THUMB_M.jpg",
        "a/@eaDir/1.jpg@SynoEAStream",
        "a/Thumbs.db",
        "b/desktop.ini",
        "__MACOSX/a/1.jpg",
        ".DS_Store",
    )
    found = scan(touch(tmp_path, "a/1.jpg", "b/2.jfif", "b/3.AVIF", *left))
    assert [entry.key for entry in found.entries] == ["a/1.jpg", "b/2.jfif", "b/3.AVIF"]
    assert found.class_names == ("a", "b") and found.ignored == ()
    source = FolderSource(kind="folder", root=str(tmp_path))
    assert source_files(source).keys() == {entry.key for entry in found.entries}


def test_what_is_no_regular_file_is_counted_and_never_opened(tmp_path: Path) -> None:
    root = touch(tmp_path, "a/1.png", "b/2.png")
    os.mkfifo(root / "a" / "pipe.png")
    (root / "b" / "link.png").symlink_to(root / "a" / "pipe.png")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "a" / "s.png"))
    source = FolderSource(kind="folder", root=str(root))
    files = {name: str(place) for name, place in source_files(source).items()}
    assert files.keys() == {"a/1.png", "b/2.png"}
    assert identity.source_fingerprint(Ingest(job="ingest", source=source))
    found = listing(source, files)
    assert set(found.entries["key"].to_pylist()) == files.keys()
    assert found.notes == ("3 files left out, not regular files but FIFOs, sockets or devices, such as a/pipe.png",)
    with pytest.raises(RecipeError, match=r"pipe\.png: not a regular file"):
        file_digests([("pipe", root / "a" / "pipe.png")])


@pytest.mark.parametrize("target", ["nowhere.png", "1.png"])
def test_links_that_lead_nowhere_are_told(target: str, tmp_path: Path) -> None:
    root = touch(tmp_path, "a/0.png", "b/2.png")
    (root / "a" / "1.png").symlink_to(target)  # the second leads to itself
    with pytest.raises(RecipeError, match=r"a/1\.png is a broken link .*remove it"):
        source_files(FolderSource(kind="folder", root=str(root)))
    with pytest.raises(ValueError, match=r"a/1\.png is a broken link.*remove it"):
        scan(root)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("filename,label\n1.png,a\n2.png,b\n", "unknown column 'filename': did you mean 'file_name'"),
        ("file_name,label,Splits\n", "unknown column 'Splits': did you mean 'split'"),
        ("file_name\n1.png\n", "needs one column 'label'"),
        ("", "needs one column 'file_name'"),
        ("file_name,label\n1.png\n", "row 2 has 1 fields, but the header 2"),
        ("file_name,label\n1.png,a,b\n", "row 2 has 3 fields, but the header 2"),
        ("file_name,label\n../1.png,a\n", r"row 2: file_name '../1.png' must be a relative path inside"),
        ("file_name,label\n/etc/1.png,a\n", "must be a relative path inside"),
        ("file_name,label\n..\\1.png,a\n", "must be a relative path inside"),
        ("file_name,label\n9.png,a\n8.png,a\n", "row 2: .* has no image '9.png'; 2 rows without an image. Restore"),
        ("file_name,label\n1,a\n2,b\n", "row 2: .* has no image '1'; 2 rows without an image. Did you mean '1.png'[?]"),
        ("file_name,label\nx/1.png,a\n", "has no image 'x/1.png'; 1 row without an image. Did you mean '1.png'[?]"),
        ("file_name,label\n1.png,a\n./1.png,b\n", "row 3: '1.png' is listed twice"),
        ("file_name,label\n1.png,\n", "'1.png' has no label"),
        ("file_name,label\n1.png,a\n", "does not list 1 of 2 images, such as '2.png'"),
        ("file_name,label,split\n1.png,a,later\n", "row 2: unknown split 'later'; expected one of: train"),
        ('file_name,label\n"1.png,a\n', "is not CSV"),
        (
            'file_name,label\n1.png,"[0, 2]"\n',
            "row 2: '1.png' has a list as its label; if images have several labels, set source.multi_label: true",
        ),
        ("file_name,label\n1.png,['a']\n", "set source.multi_label: true"),
        (
            "file_name,label\n1.png,['a' 'b']\n",
            r"row 2: '1.png': label \"\['a' 'b'\]\" looks like a list; expected one",
        ),
        (
            "file_name,label,set\n1.png,a,Training\n2.png,b,test\n",
            r"column 'set' names splits \(Training, test\). Write",
        ),
        ("file_name,label\n1.png,a\n2.png,nan\n", "'nan' looks like a mark for images without a label"),
        ("file_name;label\n1.png;a\n", "separates columns with ';'; expected commas"),
        ("file_name,label\n1.png,a;b\n2.png,b;a\n", "'a;b' looks like several labels.*label_separator: ';'"),
        ("file_name,a,b\n1.png,0,1\n2.png,1,0\n", "a, b contain only 0 and 1: if these are the classes"),
        (
            "file,labels\n1.png,a\n",
            "unknown column 'labels': did you mean 'label'[?] It needs one column 'file_name'; it has file, labels. "
            "Rename or add it, or set source.image_column: 'file' and source.label_column: 'labels'",
        ),
        ("image,label\n1.png,a\n", "it has image, label. Rename or add it, or set source.image_column: 'image'"),
    ],
)
def test_metadata_that_cannot_be_used_says_why(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scan(metadata(touch(tmp_path, "1.png", "2.png"), text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file_name,label\n", "metadata.jsonl row 1 is not JSON"),
        ("[" * 100_000, "row 1 is not JSON"),
        ('["1.png"]', "row 1 is not a JSON object"),
        ("", "needs one column 'file_name' and one column 'label'; it has none"),
        ('{"file_name": "1.png"}', "needs one column 'label'"),
        ('{"file_name": "1.png", "label": "a"}\n{"file_name": "2.png"}', "row 2: '2.png' has no label"),
        ('{"file_name": "1.png", "label": null}', "row 1: '1.png' has no label"),
        ('{"file_name": "1.png", "label": ["a", "b"]}', "'1.png' has a list as its label; if images"),
        ('{"file_name": "1.png", "label": 0.5}', "label must be text or a whole number, not 0.5"),
        ('{"file_name": ["1.png"], "label": "a"}', "file_name must be text"),
        ('{"file_name": "1.png", "label": "\\ud800"}', "label is not text in UTF-8"),
        ('{"file_name": "1.png", "label": "a", "split": null}', "unknown split ''; expected one of: train"),
    ],
)
def test_json_lines_that_cannot_be_used_say_why(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scan(metadata(touch(tmp_path, "1.png", "2.png"), text, "metadata.jsonl"))


@pytest.mark.parametrize(
    ("names", "is_joined"),
    [
        (("haze primary", "clear primary", "haze", "clear", "clear primary haze"), True),
        (("scab", "rust", "healthy", "scab rust"), True),
        (("sea lion", "sea horse", "lion"), False),
        ([f"{colour} {form}" for colour in ("red", "green", "blue") for form in ("ring", "disc", "cube")], False),
    ],
)
def test_combinations_of_words_are_told_from_names_of_several_words(names: Sequence[str], is_joined: bool) -> None:
    with pytest.raises(UserError, match="label_separator: ' '") if is_joined else nullcontext():
        check_not_joined("root", names)


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
        source_files(FolderSource(kind="folder", root=str(tmp_path)))
