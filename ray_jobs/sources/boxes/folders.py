"""Which annotations and which split belong to which image, in the layouts that COCO, YOLO, Pascal VOC and KITTI have.

    coco    one JSON per split, in its images' folder (train/_annotations.coco.json) or elsewhere
            (annotations/instances_train2017.json, train2017/1.jpg)
    yolo    images/train/1.jpg and labels/train/1.txt, or train/images and train/labels, or both in one folder;
            data.yaml or classes.txt has the names of the classes. An image without a file has no objects
    voc     Annotations/1.xml and JPEGImages/1.jpg, or both in one folder; ImageSets/Main/val.txt lists a split
    kitti   label_2/1.txt and image_2/1.png, or both in one folder

An image's folders, its JSON or a list of VOC name its split; if some images have one, those that have none are left
out (`splits_of_files`), as are images that nothing annotates.

In: the names of a folder's files, and a function that reads some. Out: the boxes and the split of each image, before
one is opened.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import yaml

from pipelines.spec import BoxFormat
from ray_jobs.data.boxes import ANY_CLASS, SHARES, Box
from ray_jobs.sources.boxes import coco, per_image
from ray_jobs.sources.boxes.per_image import KITTI_IGNORED, Named
from ray_jobs.sources.names import SPLIT_WORDS, WITHOUT_SPLIT, left_out_notes, splits_of_files
from vit_model.errors import UserError

Read = Callable[[Sequence[str]], Iterable[bytes]]
"""Yields the contents of files, in their order."""
_LABELS = {
    "images": ("labels", "annotations", "Annotations"),
    "JPEGImages": ("Annotations", "labels"),
    "image_2": ("label_2",),
}
"""A folder of images -> folders of their annotations, beside it."""
_NAMES = ("data.yaml", "data.yml", "dataset.yaml", "classes.txt")


# the names that COCO and Roboflow's exports use
COCO_FILE = re.compile(
    r"(.*/)?(annotations/(instances|captions|person_keypoints|stuff|panoptic)_[^/]*|_annotations\.coco)\.json"
)
_INSTANCES = re.compile(r"instances_.*|_annotations\.coco\.json")


class Annotation(NamedTuple):
    """What a file says about an image."""

    boxes: list[Box]
    of: tuple[int, int] | None = None
    """The width and height that the boxes are of, see `boxes.in_image`."""
    outlines: Sequence[Any] = ()
    """COCO's `segmentation` of each box."""


class Annotated(NamedTuple):
    """The boxes and the splits of a folder's images."""

    class_names: tuple[str, ...]
    images: dict[str, Annotation]
    """by their keys, sorted"""
    splits: dict[str, str | None]
    """of these images; None: to be drawn"""
    notes: tuple[str, ...] = ()


def form_of(files: Sequence[str], images: Sequence[str]) -> tuple[BoxFormat, str] | None:
    """Return the form of the annotations among a folder's files, and one of these; None without annotations.

    Files beside images in several folders that name no split are not taken for annotations: the folders are classes.
    """
    if coco_files := [key for key in files if COCO_FILE.fullmatch(key)]:
        return "coco", coco_files[0]
    present = set(files)
    folders = {PurePosixPath(key).parent.name.lower() for key in images} - {name.lower() for name in _LABELS}
    if len(folders - SPLIT_WORDS.keys()) > 1:
        return None
    if xml := _beside(images, ".xml", present):
        return "voc", next(iter(xml.values()))
    text = _beside(images, ".txt", present)
    if kitti := [key for key in text.values() if "label_2" in PurePosixPath(key).parts]:
        return "kitti", kitti[0]
    if text and {PurePosixPath(key).name for key in files} & {*_NAMES}:
        return "yolo", next(iter(text.values()))
    return None


class _Found(NamedTuple):
    class_names: tuple[str, ...]
    images: dict[str, Annotation]
    origin: dict[str, str] = {}  # noqa: RUF012 (never changed)
    """the JSON of each image, whose name may have its split"""


def annotated(form: BoxFormat, files: Sequence[str], images: Sequence[str], read: Read) -> Annotated:
    """Return the boxes and the splits of the images of a folder; `images` are those among its files.

    Raises:
        UserError: there are no annotations of this form, a file of theirs is faulty, an image of theirs is missing, or
            a path has two splits.
    """
    if form == "coco":
        found = _coco(files, images, read)
    else:
        found = _yolo(files, images, read) if form == "yolo" else _named(form, files, images, read)
    if not found.class_names:
        raise UserError("its annotations have no class")
    lists = _lists(files, images, read) if form == "voc" else {}
    # the path in which an image's split is a word, without its own name: that may be test_tube.jpg
    places = {
        image: lists.get(image) or "/".join([*PurePosixPath(image).parts[:-1], found.origin.get(image, "")])
        for image in found.images
    }
    splits, _ = splits_of_files([*dict.fromkeys(places.values())])
    left_out = {
        "without annotations": sorted(set(images) - found.images.keys()),
        WITHOUT_SPLIT: sorted(image for image, place in places.items() if place not in splits),
    }
    used = sorted(image for image, place in places.items() if place in splits)
    if not used:
        raise UserError("its annotations have no image")
    images_used = {image: found.images[image] for image in used}
    return Annotated(
        found.class_names, images_used, {image: splits[places[image]] for image in used}, left_out_notes(left_out)
    )


def _lists(files: Iterable[str], images: Iterable[str], read: Read) -> dict[str, str]:
    """Return the split of each image that a list of VOC names: ImageSets/Main/train.txt, val.txt, test.txt."""
    lists = [path for file in files if (path := PurePosixPath(file)).parts[-3:-1] == ("ImageSets", "Main")]
    by_place = {(str(PurePosixPath(image).parent.parent), PurePosixPath(image).stem): image for image in images}
    split_of = {"trainval": "train", "train": "train", "val": "val", "test": "test"}  # the first may have all of val
    chosen = [path for stem in split_of for path in lists if path.stem == stem]
    found: dict[str, str] = {}
    for path, data in zip(chosen, read([*map(str, chosen)]), strict=True):
        for line in data.decode("utf-8-sig", "replace").splitlines():
            image = by_place.get((str(path.parent.parent.parent), line.strip()))
            if image is not None:
                found[image] = split_of[path.stem]
    return found


def _coco(files: Sequence[str], images: Sequence[str], read: Read) -> _Found:
    every = [key for key in files if key.endswith(".json")]
    keys = [key for key in every if _INSTANCES.fullmatch(PurePosixPath(key).name)] or every  # others have captions
    found = {key: coco.read(data, key) for key, data in zip(keys, read(keys), strict=True)}
    if not found:
        raise UserError("no JSON file with COCO's annotations, such as annotations/instances_train.json")
    class_names = tuple(dict.fromkeys(name for each in found.values() for name in each.class_names))
    by_name: dict[str, list[str]] = defaultdict(list)
    for key in images:
        by_name[PurePosixPath(key).name].append(key)
    annotations: dict[str, Annotation] = {}
    origin: dict[str, str] = {}
    for key, each in found.items():
        numbers = [class_names.index(name) for name in each.class_names]
        for file, some in each.boxes.items():
            image = _image_of(file, key, by_name)
            if image in origin:
                raise UserError(f"{image} is annotated in {origin[image]} and in {key}")
            own = [box._replace(label=numbers[box.label]) for box in some]
            annotations[image], origin[image] = Annotation(own, each.sizes.get(file), each.outlines[file]), key
    return _Found(class_names, annotations, origin)


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


def _yolo(files: Sequence[str], images: Sequence[str], read: Read) -> _Found:
    class_names, beside = _yolo_names(files, read), _beside(images, ".txt", set(files))
    if not beside:
        raise UserError("no text files with YOLO's labels, such as labels/train/1.txt for images/train/1.jpg")
    found = dict.fromkeys(images, Annotation([]))  # an image without a file has no objects
    for (image, key), data in zip(beside.items(), read([*beside.values()]), strict=True):
        found[image] = Annotation(_in(key, per_image.yolo, data, class_names), SHARES)
    return _Found(class_names, found)


def _yolo_names(files: Iterable[str], read: Read) -> tuple[str, ...]:
    """Return the names of the classes, from the first file that has them. Raises UserError."""
    where = [key for name in _NAMES for key in files if PurePosixPath(key).name == name]
    if not where:
        raise UserError(f"no names of classes: add {_NAMES[0]} with `names`, or {_NAMES[-1]} with a name per line")
    key = where[0]
    (data,) = read([key])
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


def _named(form: BoxFormat, files: Sequence[str], images: Sequence[str], read: Read) -> _Found:
    """VOC and KITTI: a file per image, which has the names of classes."""
    ending = ".xml" if form == "voc" else ".txt"
    beside = _beside(images, ending, set(files))
    if not beside:
        example = "Annotations/1.xml for JPEGImages/1.jpg" if form == "voc" else "label_2/1.txt for image_2/1.png"
        raise UserError(f"no {ending} files with annotations, such as {example}")
    found: dict[str, tuple[tuple[int, int] | None, list[Named]]] = {}
    for (image, key), data in zip(beside.items(), read([*beside.values()]), strict=True):
        found[image] = _in(key, per_image.voc, data) if form == "voc" else (None, _in(key, per_image.kitti, data))
    used = {box.name for _, some in found.values() for box in some if box.name != KITTI_IGNORED}
    number = {name: label for label, name in enumerate(sorted(used))}
    annotations = {
        image: Annotation([Box(*box[:4], number.get(box.name, ANY_CLASS), box.ignored) for box in some], size)
        for image, (size, some) in found.items()
    }
    return _Found(tuple(number), annotations)


def _beside(images: Iterable[str], ending: str, present: Collection[str]) -> dict[str, str]:
    """Return the file of annotations of each image that has one: in a folder beside its own, or in its own."""
    found = {}
    for image in images:
        path = PurePosixPath(image)
        parts = [*path.parts[:-1]]
        places = [parts]
        for place in range(len(parts) - 1, -1, -1):
            if parts[place] in _LABELS:
                others = ([*parts[:place], name, *parts[place + 1 :]] for name in _LABELS[parts[place]])
                places = [*others, parts]
                break
        keys = ("/".join([*folders, path.stem + ending]) for folders in places)
        if (key := next((key for key in keys if key in present), None)) is not None:
            found[image] = key
    return found


def _in(key: str, reader: Callable[..., Any], *arguments: Any) -> Any:
    """Read annotations; a fault names their file."""
    try:
        return reader(*arguments)
    except UserError as error:
        raise UserError(f"{key}: {error}") from None
