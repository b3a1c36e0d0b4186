"""Which annotations and which split belong to which image, in the layouts that COCO, YOLO, Pascal VOC and KITTI have.

    coco    one JSON per split, in its images' folder (train/_annotations.coco.json) or elsewhere
            (annotations/instances_train2017.json, train2017/1.jpg)
    yolo    images/train/1.jpg and labels/train/1.txt, or train/images and train/labels, or both in one folder;
            data.yaml or classes.txt has the names of the classes. An image without a file has no objects. The folders
            or lists in data.yaml's train, val and test, or else lists such as train.txt, name the splits
    voc     Annotations/1.xml and JPEGImages/1.jpg, or both in one folder
    kitti   label_2/1.txt and image_2/1.png, or both in one folder

An image's folders, its JSON, a list of YOLO or a list such as ImageSets/Main/val.txt name its split; if some images
have one, those that have none are left out (`splits_of_files`), as are images that nothing annotates.

In: the names of a folder's files, and a function that reads some. Out: the boxes and the split of each image, before
one is opened.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import yaml

from pipelines.spec import BoxFormat, quantity
from ray_jobs.data.boxes import ANY_CLASS, SHARES, Box
from ray_jobs.sources.boxes import coco, per_image
from ray_jobs.sources.boxes.per_image import KITTI_IGNORED, Named
from ray_jobs.sources.names import WITHOUT_SPLIT, left_out_notes, listed, split_in, splits_of_files
from vit_model.errors import UserError

Read = Callable[[Sequence[str]], Iterable[bytes]]
"""Yields the contents of files, in their order."""
_LABELS = {
    "images": ("labels", "annotations", "Annotations"),
    "JPEGImages": ("Annotations", "labels"),
    "image_2": ("label_2",),
}
"""A folder of images -> folders of their annotations, beside it."""
YOLO_SPLITS = ("train", "val", "test")
BEYOND = 0.02  # of a side, by which a box may reach beyond its image without a note
_NAMES = ("data.yaml", "data.yml", "dataset.yaml", "obj.names", "classes.txt")

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
    if len([name for name in folders if split_in(name) is None]) > 1:
        return None
    if xml := _beside(images, ".xml", present):
        return "voc", next(iter(xml.values()))
    text = _beside(images, ".txt", present)
    if kitti := [key for key in text.values() if "label_2" in PurePosixPath(key).parts]:
        return "kitti", kitti[0]
    has_names = bool({PurePosixPath(key).name for key in files} & {*_NAMES})
    if any(has_names or "labels" in key.split("/") for key in text.values()):
        return "yolo", next(iter(text.values()))
    return None


class _Found(NamedTuple):
    class_names: tuple[str, ...]
    images: dict[str, Annotation]
    origin: dict[str, str] = {}  # noqa: RUF012 (never changed)
    """the JSON of each image, whose name may have its split"""
    splits: dict[str, str] = {}  # noqa: RUF012 (never changed)
    """the split of each image that a list or data.yaml names; it counts before its folders'"""
    notes: Sequence[str] = ()


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
    splits = splits_of(found.images, found.splits, found.origin)
    left_out = {
        "without annotations": sorted(set(images) - found.images.keys()),
        WITHOUT_SPLIT: sorted(found.images.keys() - splits.keys()),
    }
    if not splits:
        raise UserError("its annotations have no image")
    used = {image: found.images[image] for image in splits}
    notes = (*found.notes, *_doubts(form, found.class_names, used), *left_out_notes(left_out))
    return Annotated(found.class_names, used, splits, notes)


def splits_of(
    images: Iterable[str], listed_splits: Mapping[str, str], origin: Mapping[str, str]
) -> dict[str, str | None]:
    """Return the split of each image, sorted; if some have one, without those that have none.

    Args:
        listed_splits: of images; they count before those that a word in an image's path names.
        origin: a file about an image, whose name counts as a part of the image's path.

    Raises:
        UserError: a path contains several splits.
    """
    # without the image's own name: that may be test_tube.jpg
    places = {
        image: listed_splits.get(image) or "/".join([*PurePosixPath(image).parts[:-1], origin.get(image, "")])
        for image in sorted(images)
    }
    splits, _ = splits_of_files([*dict.fromkeys(places.values())])
    return {image: splits[place] for image, place in places.items() if place in splits}


def _doubts(form: BoxFormat, class_names: Sequence[str], images: Mapping[str, Annotation]) -> Iterator[str]:
    """Yield notes about classes without boxes, and about boxes that may be meant otherwise.

    Raises:
        UserError: all boxes lie in the first pixel, as those in shares of the image do; or most of COCO's are crowds.
    """
    boxes = [(image, box, of) for image, (some, of, _) in images.items() for box in some]
    if boxes and form != "yolo" and all(max(box[:4]) <= 1 for _, box, _ in boxes):
        raise UserError("all boxes lie within the first pixel; expected pixels, not shares of the image's sides")
    used = {box.label for _, box, _ in boxes if not box.ignored}
    if form == "coco" and (crowds := sum(box.ignored for _, box, _ in boxes)) > len(boxes) / 2:
        raise UserError(
            f"{crowds:,} of {len(boxes):,} objects have iscrowd: 1, which means a region to ignore. CVAT writes it for "
            "every mask of its brush; if these are objects, write iscrowd: 0"
        )
    if empty := [name for label, name in enumerate(class_names) if label not in used]:
        yield f"{quantity(len(empty), 'class', 'classes')} without a box: {listed(empty)}"
    beyond = [
        f"{image} ({of[0]} x {of[1]}) has [{', '.join(f'{side:g}' for side in box[:4])}]"
        for image, box, of in boxes
        if of and _is_beyond(box, of)
    ]
    if beyond:
        meant = "; COCO's bbox is x, y, width, height" if form == "coco" else ""
        number = quantity(len(beyond), "box", "boxes")
        yield f"{number} cut, more than {BEYOND:.0%} of a side beyond the image, such as: {beyond[0]}{meant}"
    if form == "voc" and (first := sum(-1 in box[:2] for _, box, _ in boxes)):
        number = quantity(first, "box begins", "boxes begin")
        yield f"{number} at 0, but VOC's pixels count from 1: if a tool counted from 0, all boxes are a pixel off"


def _is_beyond(box: Box, of: tuple[int, int]) -> bool:
    """Return whether a box reaches beyond its image by more than rounding explains: BEYOND of a side and a pixel."""
    if not all(of):
        return False  # an error of its own
    sides = ((-box.x1, of[0]), (box.x2 - of[0], of[0]), (-box.y1, of[1]), (box.y2 - of[1], of[1]))
    return any(beyond > max(BEYOND * side, of != SHARES) for beyond, side in sides)


def image_sets(
    task: str, files: Iterable[str], images: Iterable[str], read: Read
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the split of each image that a list names, and notes about lists that name no image here.

    Lists are ImageSets/train.txt, val.txt and test.txt, or those in ImageSets/`task`; a line begins with an image's
    name, without its extension or with it. The image is somewhere beside ImageSets, and the only one of this name. A
    list of test images is not about images in a folder of train, nor the other way round: KITTI numbers both from 0.
    """
    split_of = {"trainval": "train", "train": "train", "val": "val", "test": "test"}  # the first may have all of val
    form = re.compile(rf"(.*/|)ImageSets/(?:{task}/)?({'|'.join(split_of)})\.txt")
    matches = [match for file in files if (match := form.fullmatch(file))]
    lists = sorted(matches, key=lambda match: [*split_of].index(match[2]))
    by_stem: dict[str, list[str]] = defaultdict(list)
    for image in images:
        by_stem[PurePosixPath(image).stem].append(image)
    found: dict[str, str] = {}
    notes = []
    for path, data in zip(lists, read([path[0] for path in lists]), strict=True):
        names = [name for line in data.decode("utf-8-sig", "replace").splitlines() for name in line.split()[:1]]
        some = ([*by_stem.get(name, ()), *by_stem.get(PurePosixPath(name).stem, ())] for name in names)
        inside = [
            {image for image in fitting if image.startswith(path[1]) and _can_list(path[2], image)} for fitting in some
        ]
        listed_here = [image for fitting in inside if len(fitting) == 1 for image in fitting]
        found |= dict.fromkeys(listed_here, split_of[path[2]])
        notes += [] if listed_here or not names else [f"{path[0]} names no image here"]
    return found, tuple(notes)


def _can_list(split: str, image: str) -> bool:
    of_folder = split_in(image.rpartition("/")[0])
    return of_folder is None or (of_folder == "test") == (split == "test")


def _coco(files: Sequence[str], images: Sequence[str], read: Read) -> _Found:
    every = [key for key in files if key.endswith(".json")]
    keys = [key for key in every if _INSTANCES.fullmatch(PurePosixPath(key).name)] or every  # others have captions
    found = {key: coco.read(data, key) for key, data in zip(keys, read(keys), strict=True)}
    if not found:
        raise UserError("no JSON file with COCO's annotations, such as annotations/instances_train.json")
    by_name = _by_name(images)
    # COCO ships the annotations of all splits in one archive, but a folder may have the images of one split
    here = {key: each for key, each in found.items() if any(_fitting(file, by_name) for file in each.boxes)}
    notes = [f"{key} left out: none of its images is in this folder" for key in found if here and key not in here]
    found = here or found
    class_names = tuple(dict.fromkeys(name for each in found.values() for name in each.class_names))
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
    return _Found(class_names, annotations, origin, notes=notes)


def _image_of(file: str, annotations: str, by_name: Mapping[str, Sequence[str]]) -> str:
    """Return the key of an image that a JSON names.

    It is the only image with this path, or in the JSON's folder, or the only one in a folder that the JSON's name ends
    with, such as val2017. Raises UserError if there is no such image, or there are several.
    """
    split = split_in("/".join(_named_parts(file)[:-1]))  # val/1.jpg is not 1.jpg, which may be of train
    fitting = chosen = [key for key in _fitting(file, by_name) if split in (None, split_in(key.rpartition("/")[0]))]
    if len(fitting) > 1:
        stem = PurePosixPath(annotations).stem
        ends = {stem[match.end() :] for match in re.finditer("^|[^A-Za-z0-9]", stem)}
        chosen = [key for key in fitting if key == str(PurePosixPath(annotations).parent / file)]
        chosen = chosen or [key for key in fitting if not ends.isdisjoint(key.split("/")[:-1])]
    if len(chosen) == 1:
        return chosen[0]
    problem = f"there are {len(fitting)}, such as {fitting[0]}" if fitting else "there is none"
    raise UserError(f"{annotations}: image {file}: {problem}")


def _by_name(images: Iterable[str]) -> dict[str, list[str]]:
    by_name: dict[str, list[str]] = defaultdict(list)
    for image in images:
        by_name[PurePosixPath(image).name].append(image)
    return by_name


def _fitting(path: str, by_name: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the images that a path may mean: those that end with it, or else those that it ends with."""
    meant = "/".join(_named_parts(path))
    same = by_name.get(meant.rpartition("/")[2], ())
    inside = [image for image in same if f"/{image}".endswith(f"/{meant}")]
    return inside or [image for image in same if f"/{meant}".endswith(f"/{image}")]


def _yolo(files: Sequence[str], images: Sequence[str], read: Read) -> _Found:
    (key, content), beside = _yolo_content(files, read), _beside(images, ".txt", set(files))
    class_names = _yolo_names(key, content)
    if not beside:
        raise UserError("no text files with YOLO's labels, such as labels/train/1.txt for images/train/1.jpg")
    labelled = {image.rpartition("/")[0] for image in beside}
    # an image without a file has no objects, but a folder without any file may not have been annotated
    found = {image: Annotation([]) for image in images if image.rpartition("/")[0] in labelled}
    for (image, labels), data in zip(beside.items(), read([*beside.values()]), strict=True):
        found[image] = Annotation(_in(labels, per_image.yolo, data, class_names), SHARES)
    others = sorted({*files} - {*beside.values()})
    splits, missing = _yolo_splits(content, others, images, read)
    notes = [f"{key}: no image here is in {each}" for each in missing]
    lists = {*_NAMES, *(f"{split}.txt" for split in YOLO_SPLITS)}
    texts = [each for each in others if each.endswith(".txt") and PurePosixPath(each).name not in lists]
    folders = {labels.rpartition("/")[0] for labels in beside.values()}
    if alone := [each for each in texts if each.rpartition("/")[0] in folders]:
        notes.append(f"{quantity(len(alone), 'text file')} beside labels without an image of its name: {listed(alone)}")
    return _Found(class_names, found, splits=splits, notes=notes)


def _yolo_splits(
    content: Mapping[str, Any], files: Sequence[str], images: Sequence[str], read: Read
) -> tuple[dict[str, str], list[str]]:
    """Return the split of each image in the folders and lists that are named, and those without an image.

    Raises:
        UserError: an image is in two.
    """
    named = {split: content.get(split) for split in YOLO_SPLITS}
    if named["val"] == named["train"]:
        named["val"] = None  # as in examples of a few images, which are validated on what they train on
    places = {split: [each] if isinstance(each, str) else each for split, each in named.items()}
    if not any(places.values()):
        places = {split: [key for key in files if PurePosixPath(key).name == f"{split}.txt"] for split in YOLO_SPLITS}
    splits: dict[str, str] = {}
    missing: list[str] = []
    for split, some in places.items():
        for place in some if isinstance(some, list) else ():
            inside = _in_place(str(place), files, images, read)
            if twice := [image for image in inside if splits.get(image, split) != split]:
                raise UserError(f"{twice[0]} is in {splits[twice[0]]} and in {split}; expected one of them")
            splits |= dict.fromkeys(inside, split)
            missing += [] if inside else [f"{split}: {place}"]
    return splits, missing


def _named_parts(path: str) -> list[str]:
    """Return the parts of a path that are names: without the root, `.` and `..`."""
    return [part for part in PurePosixPath(path.replace("\\", "/")).parts if part not in {"/", ".", ".."}]


def _tails(place: str) -> list[str]:
    """Return the ends of a path, the longest first, that still say what it is: not the `images` of `train/images`."""
    parts = _named_parts(place)
    tails = []
    for first, part in enumerate(parts):
        if first and {each.lower() for each in parts[first:]} <= {"images", "labels", "data"}:
            break
        tails.append("/".join(parts[first:]))
        if split_in(part) is not None:
            break
    return tails


def _in_place(place: str, files: Sequence[str], images: Sequence[str], read: Read) -> list[str]:
    """Return the images in a folder, or in a list of paths, that YOLO's data.yaml names, wherever it is here."""
    tails = _tails(place)
    if not place.endswith(".txt"):
        inside = ([image for image in images if f"/{tail}/" in f"/{image}"] for tail in tails)
        tail, found = next(((tail, some) for tail, some in zip(tails, inside, strict=True) if some), ("", []))
        # folders inside may name other splits: images/train and images/val in images
        return [image for image in found if split_in(f"/{image}".partition(f"/{tail}/")[2].rpartition("/")[0]) is None]
    lists = (key for tail in tails for key in files if f"/{key}".endswith(f"/{tail}"))
    if (key := next(lists, None)) is None:
        return []
    by_name = _by_name(images)
    (data,) = read([key])
    meant = (_fitting(line.strip(), by_name) for line in data.decode("utf-8-sig", "replace").splitlines())
    return [fitting[0] for fitting in meant if len(fitting) == 1]


def _yolo_content(files: Iterable[str], read: Read) -> tuple[str, dict[str, Any]]:
    """Return the first file that has the names of the classes, and what it says. Raises UserError."""
    where = [key for name in _NAMES for key in files if PurePosixPath(key).name == name]
    if not where:
        raise UserError(f"no names of classes: add {_NAMES[0]} with `names`, or {_NAMES[-1]} with a name per line")
    found = [(key, _named_in(key, data)) for key, data in zip(where, read(where), strict=True)]
    key, content = found[0]
    for other, others in found[1:]:
        if _yolo_names(other, others) != _yolo_names(key, content):
            raise UserError(f"{key} and {other} have other names of classes; expected the same ones, in one order")
    return key, content


def _named_in(key: str, data: bytes) -> dict[str, Any]:
    """Return what a file with the names of the classes says. Raises UserError if it is not YAML."""
    if not key.endswith((".yaml", ".yml")):
        names = [name.strip() for name in data.decode("utf-8-sig", "replace").rstrip().split("\n")]
        if "" in names:
            raise UserError(f"{key}: line {names.index('') + 1} is empty; expected the class of this number")
        return {"names": names}
    try:
        content = yaml.safe_load(data)
    except yaml.YAMLError as error:
        raise UserError(f"{key}: not YAML: {error}") from None
    return content if isinstance(content, dict) else {}


def _yolo_names(key: str, content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the classes. Raises UserError, which names the file, `key`."""
    names = content.get("names")
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
    splits, notes = image_sets("Main", files, beside, read)
    return _Found(tuple(number), annotations, splits=splits, notes=notes)


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
