"""Detection of trees in photographs from the air: what augmentation gains on few real images.

    python benchmarks/trees.py

Four annotated images are inside deepforest 2.1.0, a package on PyPI (MIT), which is opened as a zip and not installed.
They are cut into tiles of 128 pixels. The tiles that reach into the right fifth of the largest image are dev and the
rest of it trains; the other three, one of the same park and two of other places, are test. The detectors differ in
their augmentation alone. Keeps AP with its interval over tiles. Half an hour on two cores beside other work.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from common import keep, setting, vitflow
from PIL import Image

from ray_jobs.evaluation.rows import MEDIAN_BOX

PACKAGE, FOLDER = "deepforest==2.1.0", "deepforest/data"
TRAIN = "2019_YELL_2_528000_4978000_image_crop2"
TEST = ("2019_YELL_2_541000_4977000_image_crop", "OSBS_029", "SOAP_061")
TILE, DEV = 128, 0.2
LEAST = 0.5  # of a tree that a tile has to show; with less, the tree is a region to ignore
AUGMENTATIONS = ("flip", "crop_flip", "scale_jitter_flip")
STEPS, BATCH = 2_000, 16

Tree = tuple[float, float, float, float]  # left, upper, right, lower


def main() -> None:
    """Write the tiles, run the recipe, and keep its table."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="vfb-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
        subprocess.run(command, check=True)
        (wheel,) = folder.glob("*.whl")
        counts = write_tiles(wheel, folder / "tiles")
        (folder / "trees.yaml").write_text(json.dumps(recipe(folder / "tiles")))  # JSON is YAML
        vitflow("run", str(folder / "trees.yaml"), store=folder / "store")
        (report,) = (folder / "store").rglob("report.json")
        keep("trees.md", page(json.loads(report.read_text())["detectors"], counts, load))


def write_tiles(wheel: Path, root: Path) -> dict[str, tuple[int, int]]:
    """Write tiles and COCO's JSON below root/train, root/dev and root/test; return each one's tiles and trees."""
    splits: dict[str, dict[str, list[Any]]] = {}
    with zipfile.ZipFile(wheel) as files:
        for stem in (TRAIN, *TEST):
            image = Image.open(BytesIO(files.read(f"{FOLDER}/{stem}.png"))).convert("RGB")
            trees = read_trees(files.read(f"{FOLDER}/{stem}.xml"))
            for left in range(0, image.width - TILE + 1, TILE):
                split = "test" if stem in TEST else "dev" if left > (1 - DEV) * image.width - TILE else "train"
                for top in range(0, image.height - TILE + 1, TILE):
                    add_tile(
                        root / split,
                        splits.setdefault(split, {"images": [], "annotations": []}),
                        image,
                        trees,
                        f"{stem}_{top}_{left}.png",
                        (left, top),
                    )
    for split, found in splits.items():
        found["categories"] = [{"id": 1, "name": "tree"}]
        (root / split / "_annotations.coco.json").write_text(json.dumps(found))
    return {
        split: (len(found["images"]), sum(not each["iscrowd"] for each in found["annotations"]))
        for split, found in splits.items()
    }


def read_trees(xml: bytes) -> list[Tree]:
    """Return the boxes of a file of annotations. The package's hash on PyPI is what makes its XML trustworthy."""
    sides = ("xmin", "ymin", "xmax", "ymax")
    boxes = ElementTree.fromstring(xml).iter("bndbox")
    return [tuple(float(box.findtext(side, "")) for side in sides) for box in boxes]  # type: ignore[misc]


def add_tile(
    folder: Path, found: dict[str, list[Any]], image: Image.Image, trees: list[Tree], name: str, at: tuple[int, int]
) -> None:
    """Write a tile, and add it and what it shows of trees to its split."""
    folder.mkdir(parents=True, exist_ok=True)
    left, top = at
    image.crop((left, top, left + TILE, top + TILE)).save(folder / name)
    number = len(found["images"])
    found["images"].append({"id": number, "file_name": name, "width": TILE, "height": TILE})
    for x1, y1, x2, y2 in trees:
        width = min(x2 - left, TILE) - max(x1 - left, 0)
        height = min(y2 - top, TILE) - max(y1 - top, 0)
        if width > 1 and height > 1:
            found["annotations"].append(
                {
                    "id": len(found["annotations"]),
                    "image_id": number,
                    "category_id": 1,
                    "bbox": [max(x1 - left, 0), max(y1 - top, 0), width, height],
                    "iscrowd": int(width * height < LEAST * (x2 - x1) * (y2 - y1)),
                }
            )


def recipe(tiles: Path) -> dict[str, Any]:
    """Return the pipeline: the tiles, and a detector for each augmentation."""
    detect = {
        "job": "detect",
        "data": "trees",
        "model": {"patch_size": 8, "width": 96, "depth": 4, "num_heads": 3},
        "resolution": TILE,
        "learning_rates": [0.001],
        "steps": STEPS,
        "batch_size": BATCH,
        "channels": 64,
        "convs": 2,
        "scales": [1, 0.5],
    }
    stages: dict[str, Any] = {
        "trees": {"job": "ingest", "source": {"kind": "folder", "name": "trees", "root": str(tiles), "boxes": "coco"}}
    }
    stages |= {policy: detect | {"augment": policy} for policy in AUGMENTATIONS}
    stages["report"] = {"job": "report", "title": "Trees from the air", "of": ["trees", *AUGMENTATIONS]}
    return {"name": "trees", "stages": stages}


def page(detectors: list[dict[str, Any]], counts: dict[str, tuple[int, int]], load: float) -> list[str]:
    """Return the lines of the page of results, the best first."""
    tiles = "; ".join(f"{split}: {count} tiles with {trees} trees" for split, (count, trees) in counts.items())
    ours = [each for each in detectors if each["method"] != MEDIAN_BOX]
    (median,) = {each["value"] for each in detectors if each["method"] == MEDIAN_BOX}
    return [
        "# Trees from the air",
        "",
        f"`python benchmarks/trees.py`, {setting(load)}. {tiles}. Detectors from scratch, {STEPS:,} steps of {BATCH}"
        f" tiles, one training each; 95% intervals over tiles. The median box has {median:.1%} AP.",
        "",
        "| augment | AP, % | less than the best | AP50 |",
        "|---|---:|---:|---:|",
        *(
            f"| {each['stage']} | {100 * each['value']:.1f} ({100 * each['low']:.1f} to {100 * each['high']:.1f}) |"
            f" {behind(each)} | {100 * each['AP50']:.1f} |"
            for each in sorted(ours, key=lambda each: -each["value"])
        ),
    ]


def behind(detector: dict[str, Any]) -> str:
    """Return how many points of AP a detector is behind the best, with the interval of the difference."""
    if detector["behind"] is None:
        return ""
    value, low, high = (100 * detector[name] for name in ("behind", "behind_low", "behind_high"))
    return f"{value:.1f} ({low:.1f} to {high:.1f})"


if __name__ == "__main__":
    main()
