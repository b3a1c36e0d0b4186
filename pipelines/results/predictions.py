"""Predictions of image files, and of a split of the data set that a model was trained on.

Out: rows {image, top: [{class, probability}, ...]}, the most likely class first, with `classes` if an image can have
several; for a split with the label; {image, objects} of a detector (`vit_model.detection.predict`), {image, pixels} of
a model of pixels; and {image, error} for a file that cannot be read. Imports torch.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from pipelines.spec import Import, RecipeError
from pipelines.store import Manifest, Store, model_folder, read_manifest
from ray_jobs.data.columns import with_combinations
from ray_jobs.data.shards import Split, open_artifact
from ray_jobs.import_model import model_of
from ray_jobs.sources.readers.folder import EXTENSIONS
from vit_model import formats
from vit_model.contract import is_segmenter
from vit_model.detection.contract import SHOWN, is_detector
from vit_model.detection.detector import load_detector
from vit_model.detection.predict import detect_readable
from vit_model.predict import BATCH, answer, classify_readable, segment_readable
from vit_model.preprocessing import decode_image
from vit_model.weights import load_model

BOX, GROUND = "#ffd166", "#14213d"
MOST_PIXELS = 2000  # of a picture's side
COLOURS = [number * factor % 256 for number in range(256) for factor in (67, 129, 199)]  # of the numbers of classes


def of_files(weights: Path, images: Sequence[Path], output: Path | None = None) -> Iterator[dict[str, Any]]:
    """Classify image files, and the images in folders, with weights of any format that `import` reads.

    A detector finds the objects in them, and a model of pixels measures the share of each class. Both write what they
    found to the folder `output`, if there is one.

    Raises:
        RecipeError: there are no files. UserError: the weights have no classifier, or cannot be read.
    """
    files: dict[Path, None] = {}  # each once
    unreadable = []
    for path in images:
        try:
            files |= dict.fromkeys(image_files(path))
        except RecipeError as error:
            unreadable.append({"image": str(path), "error": str(error)})
    if not files:
        raise RecipeError("\n".join(row["error"] for row in unreadable))
    yield from unreadable
    if is_detector(weights):
        detector, finds = load_detector(weights)
        detected = detect_readable(detector, finds, list(files))
        yield from detected if output is None else _with_pictures(detected, finds.class_names, output)
        return
    if is_segmenter(weights):
        network, contract = load_model(weights)
        segmented = segment_readable(network, contract, list(files))
        rows = (row for row, _ in segmented)
        yield from rows if output is None else _with_masks(segmented, contract.mask_classes, output)
        return
    network, contract = model_of(formats.read(weights), Import(job="import", path=str(weights)))
    yield from classify_readable(network, contract, list(files))


def _with_pictures(rows: Iterable[dict[str, Any]], classes: Sequence[str], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what a detector found; write detections.json, as COCO has annotations, and the images with boxes.

    Categories are the detector's classes, numbered from 1. Pictures have the objects with a score of SHOWN or more.
    Images that could not be read are left out.
    """
    numbers = {name: number for number, name in enumerate(classes, 1)}
    (folder / "pictures").mkdir()
    images, annotations = list[dict[str, Any]](), list[dict[str, Any]]()
    for row in rows:
        yield row
        if "error" in row:
            continue
        number = len(images) + 1
        picture = Image.fromarray(decode_image(row["image"], 3))
        images.append({"id": number, "file_name": row["image"], "width": picture.width, "height": picture.height})
        for each in row["objects"]:
            kept = {"id": len(annotations) + 1, "image_id": number, "category_id": numbers[each["class"]]}
            area = each["bbox"][2] * each["bbox"][3]
            annotations.append(kept | {"bbox": each["bbox"], "area": area, "iscrowd": 0, "score": each["score"]})
        drawn = _drawn(picture, [each for each in row["objects"] if each["score"] >= SHOWN])
        drawn.save(folder / "pictures" / f"{number:06}.jpg", quality=90)
    categories = [{"id": number, "name": name} for name, number in numbers.items()]
    content = {"images": images, "categories": categories, "annotations": annotations}
    (folder / "detections.json").write_text(json.dumps(content) + "\n", encoding="utf-8")


def _with_masks(
    rows: Iterable[tuple[dict[str, Any], NDArray[np.uint8]]], classes: Sequence[str], folder: Path
) -> Iterator[dict[str, Any]]:
    """Yield the rows; write their masks, PNGs of the numbers of classes, and masks.json {classes, images}.

    They have the sizes of the upright images. Images that could not be read are left out.
    """
    (folder / "masks").mkdir()
    images = list[dict[str, Any]]()
    for row, mask in rows:
        yield row
        if "error" in row:
            continue
        name = f"masks/{len(images) + 1:06}.png"
        picture = Image.fromarray(mask)
        picture.putpalette(COLOURS)
        picture.save(folder / name)
        images.append({"file_name": row["image"], "mask": name})
    content = {"classes": list(classes), "images": images}
    (folder / "masks.json").write_text(json.dumps(content) + "\n", encoding="utf-8")


def _drawn(picture: Image.Image, objects: Sequence[dict[str, Any]]) -> Image.Image:
    """Return a picture of up to MOST_PIXELS a side with each object's box, class and score."""
    scale = min(1.0, MOST_PIXELS / max(picture.size))
    picture = picture.resize([max(1, round(side * scale)) for side in picture.size])
    canvas = ImageDraw.Draw(picture)
    width = max(1, round(min(picture.size) / 200))
    font = ImageFont.load_default(max(10, round(min(picture.size) / 30)))
    for each in reversed(objects):  # the surest on top
        x, y, *sides = (scale * side for side in each["bbox"])
        canvas.rectangle([x, y, x + sides[0], y + sides[1]], outline=BOX, width=width)
        text = f"{each['class']} {each['score']:.2f}"
        place = (x + width, max(0.0, y - canvas.textbbox((0, 0), text, font)[3] - width))
        canvas.rectangle(canvas.textbbox(place, text, font), fill=GROUND)
        canvas.text(place, text, fill=BOX, font=font)
    return picture


def of_split(store: Store, model: Manifest, checkpoint: str, split: Split) -> Iterator[dict[str, Any]]:
    """Classify a split of the data set that a model was trained on.

    Raises:
        RecipeError: the data set is unknown, or not in the store. UserError: the model has no classifier.
    """
    if not (inputs := model.inputs.get("data")):
        raise RecipeError(f"--split {split}: {model.stage} was imported, so its data set is unknown; give IMAGES")
    data = read_manifest(store, inputs[0].job, inputs[0].key)
    if data is None:
        raise RecipeError(f"--split {split}: the data set of {model.stage} is not in {store.uri}; give IMAGES")
    network, contract = load_model(model_folder(store, model, checkpoint))
    dataset = open_artifact(store, data)
    dataset.require(split)
    index = dataset.index(split)
    for start in range(0, len(index), BATCH):
        part = index.slice(start, BATCH)
        answers = answer(network, contract, dataset.load(part, contract.preprocessing))
        named, names = with_combinations(part, dataset.info.class_names)
        for key, label, found in zip(part["key"].to_pylist(), named["label"].to_pylist(), answers, strict=True):
            yield {"image": key, "label": names[label], **found}


def image_files(path: Path) -> list[Path]:
    """Return the file itself, or the images below a folder, by their extensions. Raises RecipeError."""
    try:
        if stat.S_ISREG(mode := path.stat().st_mode):
            return [path]
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such file or folder") from None
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}") from None
    if not stat.S_ISDIR(mode):
        raise RecipeError(f"{path}: not a file or folder")
    files = sorted(
        file
        for file in path.rglob("*")
        if file.suffix.lower() in EXTENSIONS
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not files:
        raise RecipeError(f"{path}: no images found ({', '.join(EXTENSIONS)})")
    return files
