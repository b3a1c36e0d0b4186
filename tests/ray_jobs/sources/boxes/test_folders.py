"""The layouts of detection data sets: each image gets its own boxes, and faults are named."""

import pytest

from pipelines.spec import BoxFormat as Format
from ray_jobs.data.boxes import ANY_CLASS, Box, in_image
from ray_jobs.sources.boxes.folders import Annotated, annotated, form_of
from tests.ray_jobs.sources.boxes.test_formats import KITTI, VOC, dataset
from vit_model.errors import UserError

DOG = Box(10, 5, 30, 40, label=1)
NAMED = b"names: {0: cat, 1: dog}\n"
NAMES = NAMED + b"train: images/train\n"
YOLO = b"1 0.2 0.45 0.2 0.7\n"


def read(form: Format, files: dict[str, bytes]) -> Annotated:
    images = [key for key in files if key.endswith((".jpg", ".png"))]
    return annotated(form, sorted(files), images, lambda keys: [files[key] for key in keys])


def boxes(found: Annotated) -> dict[str, list[Box]]:
    return {image: in_image(some, of, 100, 50) for image, (some, of, _) in found.images.items()}


LAYOUTS: list[tuple[Format, dict[str, bytes], dict[str, list[Box]]]] = [
    ("coco", {"train/_annotations.coco.json": dataset()}, {"train/a.jpg": [DOG], "train/b.jpg": []}),
    ("coco", {"annotations/instances_val2017.json": dataset()}, {"val2017/a.jpg": [DOG], "val2017/b.jpg": []}),
    (  # as Label Studio writes it on Windows
        "coco",
        {"result.json": dataset(images=[{"id": 7, "file_name": r"C:\x\images\a.jpg", "width": 100, "height": 50}])},
        {"images/a.jpg": [DOG]},
    ),
    ("yolo", {"labels/train/a.txt": YOLO, "data.yaml": NAMES}, {"images/train/a.jpg": [DOG], "images/train/b.jpg": []}),
    ("yolo", {"train/labels/a.txt": YOLO, "data.yaml": NAMES}, {"train/images/a.jpg": [DOG]}),
    ("yolo", {"a.txt": YOLO, "classes.txt": b"cat\r\ndog\r\n"}, {"a.jpg": [DOG]}),
    ("yolo", {"images/a.txt": YOLO, "classes.txt": b"cat\ndog"}, {"images/a.jpg": [DOG]}),
    ("voc", {"annotations/a.xml": VOC.encode()}, {"images/a.jpg": [Box(10, 5, 30, 40, 0, True)]}),
    ("voc", {"VOC2007/Annotations/a.xml": VOC.encode()}, {"VOC2007/JPEGImages/a.jpg": [Box(10, 5, 30, 40, 0, True)]}),
    ("kitti", {"training/label_2/1.txt": KITTI.encode()}, {"training/image_2/1.png": [Box(10, 5, 30, 40, 0)]}),
]


@pytest.mark.parametrize(("form", "files", "expected"), LAYOUTS)
def test_each_image_has_its_boxes(form: Format, files: dict[str, bytes], expected: dict[str, list[Box]]) -> None:
    found = read(form, files | dict.fromkeys(expected, b""))
    assert {image: [pytest.approx(box) for box in some] for image, some in boxes(found).items()} == expected


def test_two_splits_of_coco_have_images_of_one_name() -> None:
    files = {
        "annotations/instances_train2017.json": dataset(),
        "annotations/instances_val2017.json": dataset(annotations=[], categories=[{"id": 1, "name": "owl"}]),
        **dict.fromkeys([f"{split}2017/{name}.jpg" for split in ("train", "val") for name in "ab"], b""),
    }
    found = read("coco", files)
    assert found.class_names == ("cat", "dog", "owl")
    assert boxes(found) == {"train2017/a.jpg": [DOG], "train2017/b.jpg": [], "val2017/a.jpg": [], "val2017/b.jpg": []}


SPLITS: list[tuple[Format, dict[str, bytes], dict[str, str | None]]] = [
    ("coco", {"train/_annotations.coco.json": dataset()}, {"train/a.jpg": "train", "train/b.jpg": "train"}),
    ("coco", {"annotations/instances_val.json": dataset()}, {"images/a.jpg": "dev", "images/b.jpg": "dev"}),
    ("coco", {"all.json": dataset()}, {"a.jpg": None, "b.jpg": None}),
    (
        "yolo",
        {"labels/train/a.txt": YOLO, "labels/test/test_tube.txt": b"", "data.yaml": NAMES},
        {"images/train/a.jpg": "train", "images/test/test_tube.jpg": "test"},
    ),
    ("yolo", {"a.txt": YOLO, "classes.txt": b"cat\ndog"}, {"a.jpg": None, "test_tube.jpg": None}),
    (
        "yolo",  # data.yaml's folders, wherever they were when it was written
        {
            "labels/x/a.txt": YOLO,
            "labels/y/b.txt": YOLO,
            "data.yaml": NAMED + b"train: /home/me/images/x\nval: ../images/y\n",
        },
        {"images/x/a.jpg": "train", "images/y/b.jpg": "dev"},
    ),
    (
        "yolo",  # its lists
        {"labels/a.txt": YOLO, "data.yaml": NAMED + b"train: [train.txt]\nval: lists/v.txt\n"}
        | {"train.txt": b"./images/a.jpg\n", "lists/v.txt": b"/data/images/b.jpg\nimages/none.jpg\n"},
        {"images/a.jpg": "train", "images/b.jpg": "dev"},
    ),
    (
        "yolo",  # lists alone
        {"labels/a.txt": YOLO, "classes.txt": b"cat\ndog", "train.txt": b"images/a.jpg", "test.txt": b"images/b.jpg"},
        {"images/a.jpg": "train", "images/b.jpg": "test"},
    ),
    (
        "yolo",  # as CVAT writes YOLO 1.1
        {"obj_train_data/a.txt": YOLO, "obj.names": b"cat\ndog\n", "train.txt": b"data/obj_train_data/a.jpg\n"},
        {"obj_train_data/a.jpg": "train"},
    ),
    (
        "yolo",  # as Roboflow writes it for a data set without test images
        {"train/labels/a.txt": YOLO, "data.yaml": NAMED + b"train: ../train/images\ntest: ../test/images\n"},
        {"train/images/a.jpg": "train"},
    ),
    (
        "yolo",
        {"train/labels/a.txt": YOLO, "test/labels/b.txt": YOLO, "data.yaml": NAMED + b"train: ../training/images\n"},
        {"train/images/a.jpg": "train", "test/images/b.jpg": "test"},
    ),
    (
        "yolo",  # the folders below say more
        {"labels/train/a.txt": YOLO, "labels/val/b.txt": YOLO, "data.yaml": NAMED + b"train: images\nval: images\n"},
        {"images/train/a.jpg": "train", "images/val/b.jpg": "dev"},
    ),
    (
        "yolo",  # validated on what it trains on, as in examples of a few images
        {"labels/a.txt": YOLO, "data.yaml": NAMED + b"train: images\nval: images\n"},
        {"images/a.jpg": "train", "images/b.jpg": "train"},
    ),
    (
        "voc",
        {f"VOC/Annotations/{stem}.xml": VOC.encode() for stem in "abc"}
        | {
            f"VOC/ImageSets/Main/{name}.txt": text
            for name, text in [("trainval", b"a\nb"), ("val", b"b.jpg 1"), ("dog_test", b"c 1")]
        },
        {"VOC/JPEGImages/a.jpg": "train", "VOC/JPEGImages/b.jpg": "dev"},
    ),
    (
        "kitti",
        {f"training/label_2/{stem}.txt": KITTI.encode() for stem in "ab"}
        | {"ImageSets/train.txt": b"a", "ImageSets/val.txt": b"b", "testing/image_2/a.png": b""},
        {"training/image_2/a.png": "train", "training/image_2/b.png": "dev"},
    ),
]


@pytest.mark.parametrize(("form", "files", "expected"), SPLITS)
def test_a_folder_or_a_list_names_the_split(
    form: Format, files: dict[str, bytes], expected: dict[str, str | None]
) -> None:
    assert read(form, files | dict.fromkeys(expected, b"")).splits == expected


def test_images_of_which_nothing_is_known_are_left_out_and_named() -> None:
    """An unannotated image, and one without a split where others have one; captions do not count as boxes."""
    files = {"annotations/instances_train.json": dataset(), "annotations/captions_train.json": b"[]", "c.jpg": b""}
    files |= {"train/a.jpg": b"", "train/b.jpg": b""}
    assert read("coco", files).notes[-1] == "1 image without annotations, left out: c.jpg"
    files["annotations/instances_val.json"] = dataset(images=[{"id": 1, "file_name": "v.jpg"}], annotations=[])
    assert "annotations/instances_val.json left out: none of its images is in this folder" in read("coco", files).notes
    labels = {"train/a.txt": YOLO, "more/c.txt": YOLO, "data.yaml": NAMES}
    images = ["train/a.jpg", "train/background.jpg", "more/c.jpg", "unlabelled/d.jpg"]
    found = read("yolo", labels | dict.fromkeys(images, b""))
    assert [*found.images] == ["train/a.jpg", "train/background.jpg"]
    assert found.notes[-2] == "1 image without annotations, left out: unlabelled/d.jpg"
    left_out = "1 image without a split (train, val, test), because others have one, left out: more/c.jpg"
    assert found.notes[-1] == left_out
    with pytest.raises(UserError, match="contains the splits dev and train"):
        read("coco", {"annotations/instances_val.json": dataset(), "train/a.jpg": b"", "train/b.jpg": b""})


def test_what_boxes_may_mean_otherwise_is_noted() -> None:
    wide = {"id": 1, "image_id": 7, "category_id": 18, "bbox": [20, 5, 90, 40]}
    notes = read("coco", {"a.json": dataset(annotations=[wide]), "a.jpg": b"", "b.jpg": b""}).notes
    assert notes == (
        "1 class without a box: cat",
        "1 box cut, more than 2% of a side beyond the image, such as: a.jpg (100 x 50) has [20, 5, 110, 45]; COCO's"
        " bbox is x, y, width, height",
    )
    from_0 = VOC.replace("<xmin>11</xmin>", "<xmin>0</xmin>").encode()
    difficult, note = read("voc", {"a.xml": from_0, "a.jpg": b""}).notes
    assert difficult == "1 class without a box: dog" and note.startswith(
        "1 box begins at 0, but VOC's pixels count from 1"
    )
    yolo = {"labels/a.txt": YOLO, "images/a.jpg": b"", "data.yaml": NAMED + b"train: images\ntest: none\n"}
    assert read("yolo", yolo | {"labels/A.txt": YOLO, "labels/classes.txt": b"cat\ndog"}).notes == (
        "data.yaml: no image here is in test: none",
        "1 text file beside labels without an image of its name: labels/A.txt",
        "1 class without a box: cat",
    )


FORMS: list[tuple[Format | None, list[str]]] = [
    ("coco", ["train/_annotations.coco.json", "train/a.jpg"]),
    ("yolo", ["data.yaml", "images/train/a.jpg", "labels/train/a.txt", "images/val/b.jpg"]),
    ("yolo", ["images/train2017/a.jpg", "labels/train2017/a.txt", "images/val2017/a.jpg"]),
    ("yolo", ["obj.names", "obj_train_data/a.jpg", "obj_train_data/a.txt"]),
    ("voc", ["JPEGImages/a.jpg", "Annotations/a.xml"]),
    ("kitti", ["training/image_2/1.png", "training/label_2/1.txt"]),
    (None, ["cat/a.jpg", "cat/a.txt", "dog/b.jpg", "classes.txt"]),  # captions in class folders
    (None, ["cat/a.jpg", "cat/a.xml", "dog/b.jpg"]),
    (None, ["label_1/a.jpg", "label_2/b.jpg", "label_2/b.txt"]),
]


@pytest.mark.parametrize(("form", "files"), FORMS)
def test_annotations_are_told_from_files_in_class_folders(form: Format | None, files: list[str]) -> None:
    found = form_of(files, [key for key in files if key.endswith((".jpg", ".png"))])
    assert (found and found[0]) == form


def test_a_region_without_a_class_is_of_any() -> None:
    found = read("kitti", {"1.txt": KITTI.replace("dog", "DontCare").encode() + KITTI.encode(), "1.png": b""})
    assert [box.label for box in found.images["1.png"].boxes] == [ANY_CLASS, 0]


FAULTS: list[tuple[Format, dict[str, bytes], str]] = [
    ("coco", {"a.jpg": b""}, "no JSON file with COCO's annotations"),
    ("coco", {"a.json": dataset(images=[], annotations=[]), "a.jpg": b""}, "its annotations have no image"),
    (
        "voc",
        {"a.jpg": b"", "a.xml": VOC.replace("<width>100", "<width>nan").encode()},
        "size/width of annotation is 'nan'",
    ),
    ("coco", {"a.json": dataset(), "a.jpg": b""}, "a.json: image b.jpg: there is none"),
    (
        "coco",
        {"a.json": dataset(images=[{"id": 7, "file_name": "val/a.jpg"}]), "a.jpg": b""},
        "val/a.jpg: there is none",
    ),
    (
        "coco",
        {"a.json": dataset(annotations=[{"image_id": 7, "category_id": 17, "bbox": [0.1, 0.1, 0.5, 0.5]}])}
        | {"a.jpg": b"", "b.jpg": b""},
        "all boxes lie within the first pixel; expected pixels",
    ),
    (
        "coco",  # as CVAT writes masks of its brush
        {"a.json": dataset(annotations=[{"image_id": 7, "category_id": 17, "bbox": [0, 0, 9, 9], "iscrowd": 1}])}
        | {"a.jpg": b"", "b.jpg": b""},
        "1 of 1 objects have iscrowd: 1, which means a region to ignore. CVAT writes it",
    ),
    (
        "yolo",
        {"labels/a.txt": YOLO, "images/a.jpg": b"", "data.yaml": NAMED + b"train: images\ntest: [images/]\n"},
        "images/a.jpg is in train and in test; expected one of them",
    ),
    (
        "coco",
        {"a.json": dataset(), "x/a.jpg": b"", "y/a.jpg": b"", "b.jpg": b""},
        "image a.jpg: there are 2, such as x/",
    ),
    (
        "coco",
        {"a.json": dataset(), "b.json": dataset(), "a.jpg": b"", "b.jpg": b""},
        "annotated in a.json and in b.json",
    ),
    ("yolo", {"a.jpg": b"", "a.txt": YOLO}, "no names of classes: add data.yaml"),
    (
        "yolo",
        {"a.jpg": b"", "a.txt": YOLO, "data.yaml": NAMES, "labels/classes.txt": b"dog\ncat"},
        "data.yaml and labels/classes.txt have other names of classes",
    ),
    ("yolo", {"a.jpg": b"", "data.yaml": NAMES}, "no text files with YOLO's labels"),
    ("yolo", {"a.jpg": b"", "a.txt": b"9 1 1 1 1", "data.yaml": NAMES}, "a.txt: '9 1 1 1 1' is of class 9"),
    ("yolo", {"a.jpg": b"", "a.txt": YOLO, "data.yaml": b"names: {1: cat}"}, "names is not a list"),
    ("yolo", {"a.jpg": b"", "a.txt": YOLO, "data.yaml": b"names: [a, a]"}, "two classes have one name"),
    ("yolo", {"a.jpg": b"", "a.txt": YOLO, "data.yaml": b"]"}, "not YAML"),
    ("yolo", {"a.jpg": b"", "a.txt": YOLO, "classes.txt": b"cat\n\ndog\n"}, "classes.txt: line 2 is empty"),
    ("voc", {"a.jpg": b""}, "no .xml files with annotations, such as Annotations/1.xml"),
    ("kitti", {"a.png": b"", "a.txt": b"Car"}, "a.txt: 'Car' has 1 columns"),
]


@pytest.mark.parametrize(("form", "files", "message"), FAULTS)
def test_a_fault_is_named(form: Format, files: dict[str, bytes], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(form, files)
