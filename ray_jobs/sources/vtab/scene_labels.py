"""Labels of VTAB's images of scenes, CLEVR and KITTI, from their authors' annotations.

In: CLEVR's list of scenes; KITTI's label files and devkit. Out: counts, and distances binned as in the benchmark
(data/clevr.py and data/kitti.py of google-research/task_adaptation).
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from vit_model.errors import UserError

CLEVR_OBJECTS = range(3, 11)  # possible numbers of objects in a scene
CLEVR_DISTANCES = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0)
KITTI_DISTANCES = (-100.0, 8.0, 20.0, 999.0)  # metres; the last interval means no vehicle
NO_VEHICLE = 1000.0
VEHICLES = ("Car", "Van", "Truck")  # not Tram
KITTI_TYPES = (*VEHICLES, "Pedestrian", "Person_sitting", "Cyclist", "Tram", "Misc", "DontCare")
_NEEDED = ("scenes", "image_filename", "objects", "pixel_coords")


def interval(value: float, thresholds: Sequence[float]) -> int:
    """Return the index of the largest of ascending thresholds that is strictly below the value.

    Raises:
        UserError: no threshold is below the value, or the value is NaN.
    """
    index = bisect_left(thresholds, value) - 1
    if index < 0:
        raise UserError(f"{value} is not above {thresholds[0]:g}")
    return index


def clevr_count(scene: Mapping[str, Any]) -> int:
    """Return the number of objects minus 3, the minimum. Raises UserError for a number that is not 3 to 10."""
    number = len(scene["objects"])
    if number not in CLEVR_OBJECTS:
        raise UserError(f"{scene['image_filename']} has {number} objects, not 3 to 10")
    return number - CLEVR_OBJECTS.start


def clevr_distance(scene: Mapping[str, Any]) -> int:
    """Return the interval of the nearest object's depth in the camera's frame. Raises UserError outside (0, 100]."""
    nearest = min(float(item["pixel_coords"][2]) for item in scene["objects"])
    label = interval(nearest, CLEVR_DISTANCES)
    if label == len(CLEVR_DISTANCES) - 1:
        raise UserError(f"{nearest} is not in (0, 100]")
    return label


def clevr_scenes(data: bytes) -> list[dict[str, Any]]:
    """Return the scenes of a `CLEVR_<split>_scenes.json`, with the fields that their labels need.

    Raises:
        UserError: the file has another form, or a scene has no name or no objects.
    """
    try:
        # all fields of 70,000 scenes would need several GB of memory
        content = json.loads(data, object_hook=lambda item: {key: item[key] for key in _NEEDED if key in item})
    except (ValueError, RecursionError) as error:
        raise UserError("is not the JSON of CLEVR's scenes, or is truncated") from error
    scenes = content.get("scenes") if isinstance(content, dict) else None
    if not isinstance(scenes, list):
        raise UserError("has no list of scenes")
    for scene in scenes:
        if not isinstance(scene, dict) or not isinstance(scene.get("image_filename"), str):
            raise UserError("has a scene without image_filename")
        if not isinstance(scene.get("objects"), list):
            raise UserError(f"has no objects for {scene['image_filename']}")
    return scenes


# ------------------------------------------------------------------------------------------------- KITTI


def kitti_label(text: str) -> int:
    """Return the interval of the nearest vehicle's distance (z, in the camera's frame); 3 for no vehicle.

    `text` is a label file with one object per line and 15 columns: 0 is the type, 11 to 13 are the location x, y, z.
    Raises UserError.
    """
    depths = [NO_VEHICLE]
    for line in text.splitlines():
        columns = line.split()
        if not columns:
            continue
        if len(columns) != 15 or columns[0] not in KITTI_TYPES:
            raise UserError(f"{line!r} is not the label of an object; expected 15 columns, the first one a type")
        if columns[0] in VEHICLES:
            depths.append(float(columns[13]))
    return interval(min(depths), KITTI_DISTANCES)


def kitti_drives(rand: str, mapping: str) -> list[str]:
    """Return the drive in which each training image was recorded, by the image's number.

    `rand` is the devkit's train_rand.txt, and `mapping` its train_mapping.txt with lines "date drive frame". Image i
    is in line rand[i] of `mapping`, counted from 1. Raises UserError.
    """
    lines = mapping.splitlines()
    drives = []
    for number in re.split(r"[\s,]+", rand.strip().strip(",")):
        if not number.isdecimal() or not 1 <= int(number) <= len(lines):
            raise UserError(f"train_rand.txt: {number[:20]!r} is not the number of a line of train_mapping.txt")
        columns = lines[int(number) - 1].split()
        if len(columns) != 3:
            raise UserError(f"line {number} of train_mapping.txt is not date, drive, frame")
        drives.append(columns[1])
    return drives


def _drives(date: str, numbers: str) -> frozenset[str]:
    return frozenset(f"{date}_drive_{number}_sync" for number in numbers.split())


# As TFDS draws them (NumPy's legacy seed 123, 14 test drives of the 141 sorted names, then 14 of the others).
_TEST = (
    _drives("2011_09_26", "0001 0011 0070 0087")
    | _drives("2011_09_28", "0001 0070 0094 0102 0154 0167 0185 0199 0204")
    | _drives("2011_10_03", "0047")
)
_VALIDATION = _drives("2011_09_26", "0027 0035 0052 0057 0079 0084") | _drives(
    "2011_09_28", "0016 0021 0043 0138 0143 0146 0162 0165"
)
PARTS = dict.fromkeys(_TEST, "test") | dict.fromkeys(_VALIDATION, "validation")
