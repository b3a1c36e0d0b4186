"""Which annotations belong to which image of a folder, in the layouts that COCO, YOLO, Pascal VOC and KITTI have.

    coco    one JSON per split, in its images' folder (train/_annotations.coco.json) or elsewhere
            (annotations/instances_train2017.json, train2017/1.jpg)
    yolo    images/train/1.jpg and labels/train/1.txt, or train/images and train/labels, or both in one folder;
            data.yaml or classes.txt has the names of the classes. An image without a file has no objects
    voc     Annotations/1.xml and JPEGImages/1.jpg, or both in one folder
    kitti   label_2/1.txt and image_2/1.png, or both in one folder

In: the names of a folder's files, and a function that reads one. Out: the boxes of each image, before one is opened.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import Any, Literal, NamedTuple

import yaml

from ray_jobs.data.boxes import Box
from ray_jobs.sources.boxes import coco, per_image
from ray_jobs.sources.boxes.per_image import KITTI_IGNORED, Named
from vit_model.errors import UserError

Format = Literal["coco", "yolo", "voc", "kitti"]
Read = Callable[[str], bytes]
InPixels = Callable[[int, int], list[Box]]
"""The boxes of an image of a width and a height. Raises UserError if its annotations are of another size."""
_LABELS = {"images": "labels", "JPEGImages": "Annotations", "image_2": "label_2"}
"""A folder of images -> the folder of their annotations, beside it."""
_NAMES = ("data.yaml", "data.yml", "dataset.yaml", "classes.txt")


class Annotated(NamedTuple):
    """The boxes of a folder's images."""

    class_names: tuple[str, ...]
    boxes: dict[str, InPixels]
    """of each image that is annotated, by its key"""
    files: dict[str, str]
    """the file with the annotations of these images, if there is one"""


def annotated(form: Format, files: Sequence[str], images: Sequence[str], read: Read) -> Annotated:
    """Return the boxes of the images of a folder; `images` are those among its files.

    Raises:
        UserError: there are no annotations of this form, a file of theirs is faulty, or an image of theirs is missing.
    """
    if form == "coco":
        return _coco(files, images, read)
    return _yolo(files, images, read) if form == "yolo" else _named(form, files, images, read)


def _coco(files: Sequence[str], images: Sequence[str], read: Read) -> Annotated:
    found = {key: coco.read(read(key), key) for key in files if key.endswith(".json")}
    if not found:
        raise UserError("no JSON file with COCO's annotations, such as annotations/instances_train.json")
    class_names = tuple(dict.fromkeys(name for each in found.values() for name in each.class_names))
    by_name: dict[str, list[str]] = defaultdict(list)
    for key in images:
        by_name[PurePosixPath(key).name].append(key)
    boxes: dict[str, InPixels] = {}
    origin: dict[str, str] = {}
    for key, each in found.items():
        numbers = [class_names.index(name) for name in each.class_names]
        for file, some in each.boxes.items():
            image = _image_of(file, key, by_name)
            if image in origin:
                raise UserError(f"{image} is annotated in {origin[image]} and in {key}")
            own = [box._replace(label=numbers[box.label]) for box in some]
            boxes[image], origin[image] = partial(_of_size, own, each.sizes.get(file)), key
    return Annotated(class_names, boxes, origin)


def _image_of(file: str, annotations: str, by_name: Mapping[str, Sequence[str]]) -> str:
    """Return the key of an image that a JSON names.

    It is in the JSON's folder, or the only image with this path, or the only one in a folder that the JSON's name ends
    with, such as val2017.

    Raises:
        UserError: there is no such image, or there are several.
    """
    fitting = [key for key in by_name[PurePosixPath(file).name] if f"/{key}".endswith(f"/{file}")]
    beside = str(PurePosixPath(annotations).parent / file)
    if beside in fitting or len(fitting) == 1:
        return beside if beside in fitting else fitting[0]
    stem = PurePosixPath(annotations).stem
    named = [key for key in fitting if any(stem.endswith(part) for part in PurePosixPath(key).parts[:-1])]
    if len(named) == 1:
        return named[0]
    problem = f"there are {len(fitting)}, such as {fitting[0]}" if fitting else "there is none"
    raise UserError(f"{annotations}: image {file}: {problem}")


def _of_size(boxes: list[Box], size: tuple[int, int] | None, width: int, height: int) -> list[Box]:
    if size is not None and size != (width, height):
        raise UserError(f"its annotations are of {size[0]} x {size[1]} pixels, the image has {width} x {height}")
    return boxes


def _yolo(files: Sequence[str], images: Sequence[str], read: Read) -> Annotated:
    class_names = _yolo_names(files, read)
    present = set(files)
    beside = {image: key for image in images if (key := _beside(image, ".txt")) in present}
    if not beside:
        raise UserError("no text files with YOLO's labels, such as labels/train/1.txt for images/train/1.jpg")
    boxes = {
        image: _in(beside[image], per_image.yolo, read(beside[image]), class_names) if image in beside else _none
        for image in images
    }
    return Annotated(class_names, boxes, beside)


def _yolo_names(files: Iterable[str], read: Read) -> tuple[str, ...]:
    """Return the names of the classes, from the first file that has them. Raises UserError."""
    where = [key for name in _NAMES for key in files if PurePosixPath(key).name == name]
    if not where:
        raise UserError(f"no names of classes: add {_NAMES[0]} with `names`, or {_NAMES[-1]} with a name per line")
    data, key = read(where[0]), where[0]
    if key.endswith(".txt"):
        names: Any = data.decode("utf-8-sig", "replace").split("\n")
        names = [name.strip() for name in names if name.strip()]
    else:
        try:
            content = yaml.safe_load(data)
        except yaml.YAMLError as error:
            raise UserError(f"{key}: not YAML: {error}") from None
        names = content.get("names") if isinstance(content, dict) else None
        if isinstance(names, dict) and [*names] == [*range(len(names))]:
            names = [*names.values()]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"{key}: names is not a list of the classes' names, in the order of their numbers")
    if len(set(names)) < len(names):
        raise UserError(f"{key}: two classes have one name")
    return tuple(names)


def _named(form: Format, files: Sequence[str], images: Sequence[str], read: Read) -> Annotated:
    """VOC and KITTI: a file per image, which has the names of classes."""
    ending, present = ".xml" if form == "voc" else ".txt", set(files)
    beside = {image: key for image in images if (key := _beside(image, ending)) in present}
    if not beside:
        example = "Annotations/1.xml for JPEGImages/1.jpg" if form == "voc" else "label_2/1.txt for image_2/1.png"
        raise UserError(f"no {ending} files with annotations, such as {example}")
    found: dict[str, tuple[tuple[int, int] | None, list[Named]]] = {}
    for image, key in beside.items():
        if form == "voc":
            found[image] = _in(key, per_image.voc, read(key))
        else:
            found[image] = None, _in(key, per_image.kitti, read(key))
    used = {box.name for _, some in found.values() for box in some if box.name != KITTI_IGNORED}
    number = {name: label for label, name in enumerate(sorted(used))}
    boxes: dict[str, InPixels] = {}
    for image, (size, some) in found.items():
        own = [Box(*box[:4], number.get(box.name, 0), box.ignored) for box in some]
        boxes[image] = partial(_of_size, own, size)
    return Annotated(tuple(number), boxes, beside)


def _beside(image: str, ending: str) -> str:
    """Return the key of an image's annotations: in the folder beside its own, if that is one for images."""
    path = PurePosixPath(image)
    parts = [*path.parts[:-1]]
    for place in range(len(parts) - 1, -1, -1):
        if parts[place] in _LABELS:
            parts[place] = _LABELS[parts[place]]
            break
    return "/".join([*parts, path.stem + ending])


def _in(key: str, reader: Callable[..., Any], *arguments: Any) -> Any:
    """Read annotations; a fault names their file."""
    try:
        return reader(*arguments)
    except UserError as error:
        raise UserError(f"{key}: {error}") from None


def _none(width: int, height: int) -> list[Box]:
    return []
