"""The same boxes from COCO's, YOLO's, VOC's and KITTI's annotations, and one sentence for each fault."""

import json
from typing import Any

import pytest

from ray_jobs.data.boxes import SHARES, Box, in_image
from ray_jobs.sources.boxes import coco
from ray_jobs.sources.boxes.per_image import Named, kitti, voc, yolo
from vit_model.errors import UserError

NAMES = ("cat", "dog")
VOC = """<annotation><size><width>100</width><height>50</height><depth>3</depth></size>
<object><name>dog</name><difficult>1</difficult><bndbox><xmin>11</xmin><ymin>6</ymin><xmax>30</xmax><ymax>40</ymax></bndbox></object>
</annotation>"""
KITTI = "dog 0.00 0 -1.57 10.00 5.00 30.00 40.00 1.65 1.67 3.64 -0.65 1.71 46.70 -1.59\n"


def dataset(**parts: Any) -> bytes:
    """COCO's annotations of two images, one without boxes."""
    image = {"id": 7, "file_name": "a.jpg", "width": 100, "height": 50}
    annotation = {"id": 1, "image_id": 7, "category_id": 18, "bbox": [10, 5, 20, 35], "iscrowd": 0}
    found = {
        "images": [image, {"id": 9, "file_name": "b.jpg"}],
        "annotations": [annotation],
        "categories": [{"id": 18, "name": "dog"}, {"id": 17, "name": "cat"}],
    }
    return json.dumps(found | parts).encode()


def test_all_formats_say_the_same() -> None:
    found = coco.read(dataset(), "train.json")
    box = Box(10, 5, 30, 40, label=1)
    assert found.class_names == NAMES and found.sizes == {"a.jpg": (100, 50)}
    assert found.boxes == {"a.jpg": [box], "b.jpg": []}
    assert in_image(yolo(b"1 0.2 0.45 0.2 0.7\n\n", NAMES), SHARES, 100, 50) == [pytest.approx(box)]
    assert voc(VOC.encode()) == ((100, 50), [Named(10, 5, 30, 40, "dog", ignored=True)])
    assert kitti(KITTI.encode()) == [Named(10, 5, 30, 40, "dog")]
    assert kitti(KITTI.replace("dog", "DontCare").encode())[0].ignored
    crowd = {"id": 1, "image_id": 7, "category_id": 17, "bbox": [0, 0, 9, 9], "iscrowd": 1, "segmentation": {}}
    assert coco.read(dataset(annotations=[crowd]), "train.json").boxes["a.jpg"] == [Box(0, 0, 9, 9, 0, ignored=True)]


ANNOTATION = {"id": 3, "image_id": 7, "category_id": 18, "bbox": [0, 0, 1, 1]}
COCO_FAULTS = [
    (b"{", "train.json: not JSON"),
    (b"[" * 100_000, "train.json: not JSON"),
    (b"[]", "not COCO's annotations: an object with images, annotations and categories"),
    (dataset(categories=None), "categories is not a list"),
    (dataset(annotations=[ANNOTATION | {"image_id": 8}]), "annotation 3 is of image 8, which is not listed"),
    (dataset(annotations=[ANNOTATION | {"category_id": 1}]), "annotation 3 is of class 1, which is not listed"),
    (dataset(annotations=[ANNOTATION | {"bbox": [1, 2, 3]}]), r"bbox of annotation 3 is \[1, 2, 3\]"),
    (dataset(annotations=[ANNOTATION | {"bbox": None}]), r"annotations\[0\].bbox is None; expected \[x, y,"),
    (
        dataset(images=[{"id": 1, "file_name": "a"}, {"id": 2, "file_name": "a"}], annotations=[]),
        "2, a, is listed twice",
    ),
    (dataset(annotations=[ANNOTATION | {"bbox": [10**400, 0, 1, 1]}]), "more than 300 digits"),
    (dataset(categories=[{"id": 1, "name": "cat"}, {"id": 1, "name": "dog"}]), "class 1, dog, is listed twice"),
    (
        dataset(
            categories=[{"id": 1, "name": "cat"}, {"id": 18, "name": "cat"}],
            annotations=[ANNOTATION, ANNOTATION | {"category_id": 1}],
        ),
        "class 18, cat, is listed twice",
    ),
    (dataset(images=[{"id": "1", "file_name": "a"}]), r"images\[0\].id is '1'; expected a whole number"),
]


@pytest.mark.parametrize(("data", "message"), COCO_FAULTS)
def test_a_fault_of_coco_is_named(data: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        coco.read(data, "train.json")


def test_a_class_may_have_the_name_of_its_supercategory() -> None:
    """Roboflow's exports list the name of the project as a class without boxes, before the classes."""
    found = coco.read(dataset(categories=[{"id": 0, "name": "cat"}, {"id": 18, "name": "cat"}]), "train.json")
    assert found.class_names == ("cat",)
    assert [box.label for box in found.boxes["a.jpg"]] == [0]


FAULTS = [
    (yolo, b"2 0.5 0.5 0.1 0.1", "is of class 2; there are 0 to 1"),
    (yolo, b"nan 0.5 0.5 0.1 0.1", "is of class nan"),
    (yolo, b"0.5 0.5 0.5 0.1 0.1", "is of class 0.5"),
    (yolo, b"0 0.5 0.5 1.5 0.1", "not in shares of the image"),
    (yolo, b"0 nan 0.5 0.5 0.1", "not in shares of the image"),
    (yolo, b"0 0.5 0.5 0.1", "has 4 numbers, not 5"),
    (yolo, b"0 0.1 0.1 0.2 0.1 0.2 0.2", "has 7 numbers; a box has 5. Outlines, rotated boxes"),
    (yolo, b"cat 0.5 0.5 0.1 0.1", "not a number"),
    (yolo, b"\xff\xfe", "not text in UTF-8"),
    (yolo, b" " * (5 << 20), "bytes of annotations"),
    (kitti, b"Car 1 2 3", "has 4 columns, not 15"),
    (kitti, KITTI.replace("40.00", "x").encode(), "not a number"),
    (voc, b"<annotation>", "not XML"),
    (voc, b'<!DOCTYPE a [<!ENTITY b "c">]><annotation/>', "declares entities"),
    (voc, VOC.replace("<xmin>11</xmin>", "").encode(), "bndbox/xmin of object is None, not a number"),
    (voc, VOC.replace("dog", " ").encode(), "an object without a name"),
]


@pytest.mark.parametrize(("read", "data", "message"), FAULTS)
def test_a_fault_of_an_images_file_is_named(read: Any, data: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(data, NAMES) if read is yolo else read(data)
