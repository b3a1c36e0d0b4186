"""Images with boxes, and their annotations in the forms of COCO, YOLO, Pascal VOC and KITTI."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from ray_jobs.data.boxes import Box

WIDTH, HEIGHT = 40, 20
CLASSES = ("cat", "dog")
BOXES = {
    "train/1": [Box(4, 2, 20, 18, 1), Box(0, 0, 8, 4, 0)],
    "train/2": [],
    "val/3": [Box(30, 10, 40, 20, 0)],
    "test/4": [Box(12, 6, 16, 20, 1)],
}


def coco(root: Path, boxes: dict[str, list[Box]]) -> None:
    for split in ("train", "val", "test"):
        names = [name for name in boxes if name.startswith(split)]
        (root / split / "_annotations.coco.json").write_text(
            json.dumps(
                {
                    "images": [
                        {"id": number, "file_name": f"{Path(name).name}.png", "width": WIDTH, "height": HEIGHT}
                        for number, name in enumerate(names)
                    ],
                    "categories": [{"id": 7 + label, "name": name} for label, name in enumerate(CLASSES)],
                    "annotations": [
                        {
                            "image_id": number,
                            "category_id": 7 + box.label,
                            "bbox": [box.x1, box.y1, box.x2 - box.x1, box.y2 - box.y1],
                        }
                        for number, name in enumerate(names)
                        for box in boxes[name]
                    ],
                }
            )
        )


def yolo(root: Path, boxes: dict[str, list[Box]]) -> None:
    (root / "data.yaml").write_text(f"names: {list(CLASSES)}")
    for name, some in boxes.items():
        lines = (
            f"{box.label} {(box.x1 + box.x2) / 2 / WIDTH} {(box.y1 + box.y2) / 2 / HEIGHT}"
            f" {(box.x2 - box.x1) / WIDTH} {(box.y2 - box.y1) / HEIGHT}\n"
            for box in some
        )
        (root / f"{name}.txt").write_text("".join(lines))


def voc(root: Path, boxes: dict[str, list[Box]]) -> None:
    for name, some in boxes.items():
        objects = "".join(
            f"<object><name>{CLASSES[box.label]}</name><bndbox><xmin>{box.x1 + 1}</xmin><ymin>{box.y1 + 1}</ymin>"
            f"<xmax>{box.x2}</xmax><ymax>{box.y2}</ymax></bndbox></object>"
            for box in some
        )
        size = f"<size><width>{WIDTH}</width><height>{HEIGHT}</height></size>"
        (root / f"{name}.xml").write_text(f"<annotation>{size}{objects}</annotation>")


def kitti(root: Path, boxes: dict[str, list[Box]]) -> None:
    for name, some in boxes.items():
        sides = (f"{CLASSES[box.label]} 0 0 0 {box.x1} {box.y1} {box.x2} {box.y2} 1 1 1 0 0 0 0\n" for box in some)
        (root / f"{name}.txt").write_text("".join(sides))


FORMS = {"coco": coco, "yolo": yolo, "voc": voc, "kitti": kitti}


def made(root: Path, form: str, boxes: dict[str, list[Box]] = BOXES) -> dict[str, Any]:
    """A folder of images with annotations, and its source."""
    for number, name in enumerate(boxes):
        path = root / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(256, size=(HEIGHT, WIDTH, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    FORMS[form](root, boxes)
    return {"kind": "folder", "root": str(root), "boxes": form}


def boxed_photos(root: Path) -> dict[str, Any]:
    """Black photographs of several sizes, each with a white box."""
    rng, boxes = np.random.default_rng(0), {}
    for number in range(16):
        width, height = rng.integers(60, 120, 2).tolist()
        x1, y1 = (int(rng.integers(0, side // 2)) for side in (width, height))
        box = Box(x1, y1, x1 + int(rng.integers(20, width // 2)), y1 + int(rng.integers(20, height // 2)), number % 2)
        image = Image.new("RGB", (width, height))
        ImageDraw.Draw(image).rectangle([box.x1, box.y1, box.x2 - 1, box.y2 - 1], fill="white")
        name = f"{'test' if number > 13 else 'train'}/{number}"
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        image.save(root / f"{name}.png")
        boxes[name] = [box]
    kitti(root, boxes)
    return {"kind": "folder", "root": str(root), "boxes": "kitti"}


def shown(crop: NDArray[np.float64], size: NDArray[np.int64], side: int, is_flipped: bool) -> NDArray[np.bool_]:
    """The pixels of a crop (top, left, height, width) that show its image (width, height), except at its border."""
    along = []
    for start, extent, length in zip(crop[:2], crop[2:], size[::-1], strict=True):
        pixel = extent / side
        places = start + (np.arange(side) + 0.5) * pixel
        low, high = (pixel if start < 0 else 0), length - (pixel if start + extent > length else 0)
        along.append((places >= low) & (places < high))
    inside = along[0][:, None] & along[1]
    return inside[:, ::-1] if is_flipped else inside
