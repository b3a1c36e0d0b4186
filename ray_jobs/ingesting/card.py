"""A dataset's card: a summary for people (card.md, contact_sheet.jpg) and for programs (card.json).

Pictures, means and deviations come from one shard, which is a random sample of the dataset; no other shard is read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image

from pipelines.spec import quantity
from ray_jobs.data.columns import CONFLICT, each_label
from ray_jobs.data.masks import IGNORED
from ray_jobs.data.shards import SPLITS, Dataset, Images, Split
from ray_jobs.ingesting.splits import Trainable
from ray_jobs.reporting.drawing.pictures import SMALL, sample_rows, squares
from ray_jobs.sources.archives.entries import Unusable
from ray_jobs.sources.names import listed
from vit_model.contract import Preprocessing
from vit_model.errors import UserError

SAMPLE, SIDE = 128, 64  # number of images, and their pixels per side, that means are computed from
SHOWN = 40  # classes and reasons in card.md; card.json has all of them
DARK = 32  # of 255; 12 of 16 bits reach 15
_GAP = 2  # pixels between pictures
_LINES = 5  # of pictures, without classes


def card_shard(index: pa.Table) -> int:
    """Return the number of the shard that the card shows: the one with the first image of `shown_split`."""
    is_shown = pc.equal(index["split"], shown_split(index["split"].to_pylist()))
    shown = index.select(["sample_id", "shard"]).filter(is_shown).sort_by("sample_id")
    return int(shown["shard"][0].as_py())


def shown_split(splits: Iterable[str]) -> Split:
    """Return the split that the card shows: the first of train, dev and test that has images."""
    present = set(splits)
    return next(split for split in SPLITS if split in present)


def copies_note(number: int, kind: str, done: str) -> str:
    """Return in words how many copies of a kind there are, and what was done with them."""
    if kind == CONFLICT:
        return f"{quantity(number, 'copy', 'copies')} with {kind}, {done}"
    return f"{quantity(number, f'{kind} copy', f'{kind} copies')}, {done}"


def masks_note(names: Sequence[str], pixels: Mapping[int, int]) -> tuple[str, ...]:
    """Return a note about the classes' shares of the masks' pixels; nothing without masks.

    Raises:
        UserError: a single class has pixels, and others are 255, which is ignored: an object in many binary masks.
    """
    total = sum(pixels.values())
    if not names or not total:
        return ()
    shares = {name: pixels.get(number, 0) / total for number, name in enumerate(names)}
    absent, ignored = [name for name, share in shares.items() if not share], pixels.get(IGNORED, 0) / total
    if len(absent) == len(names) - 1 and ignored:
        raise UserError(
            f"no mask has a pixel of {listed(absent)}, and {ignored:.1%} of the pixels have the value {IGNORED}, which"
            f" is ignored; if these are {absent[0]}, write {names.index(absent[0])} in their place"
        )
    said = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    return (f"pixels of masks: {said}, ignored {ignored:.1%}",)


def class_notes(trainable: Trainable, most: int | None = SHOWN) -> list[str]:
    """Return notes on classes set aside and on classes without images in a split; each names at most `most` classes."""
    index, names, aside = trainable.index, trainable.class_names, trainable.set_aside_classes
    notes = []
    if aside:
        images = sum(number for _, number in aside)
        named = listed([f"{name!r} ({number:,})" for name, number in aside], most)
        notes.append(
            f"classes without a training image, set aside: {len(aside):,} of {len(aside) + len(names):,} "
            f"({quantity(images, 'image')}): {named}. Add images, or give the splits yourself (split folders, or a "
            "column `split` in the metadata)"
        )
    for split in SPLITS:
        images = index.filter(pc.equal(index["split"], split))
        present = set(each_label(images).to_pylist())
        missing = [repr(name) for label, name in enumerate(names) if label not in present]
        if len(images) and missing:
            notes.append(
                f"classes without an image in {split}: {len(missing):,} of {len(names):,}: {listed(missing, most)}"
            )
    return notes


def write_card(
    folder: Path,
    dataset: Dataset,
    shard: int,
    unusable: Sequence[Unusable],
    copies: pa.Table,
    trainable: Trainable,
) -> None:
    """Write card.json, card.md and contact_sheet.jpg. This reads only shard number `shard` of the dataset."""
    split = shown_split(split for split, images in dataset.info.splits.items() if images)
    rows = np.flatnonzero(dataset.index(split)["shard"].to_numpy() == shard)
    shown = _contact_sheet(folder / "contact_sheet.jpg", dataset, split, rows)
    pixels = _pixels(dataset, split, rows[:SAMPLE])
    card = _counts(dataset, unusable, copies) | {
        "set_aside": [{"name": name, "images": number} for name, number in trainable.set_aside_classes],
        "pixels": pixels,
        "contact_sheet": shown,
    }
    if (lightest := pixels.pop("lightest")) < DARK:
        card["notes"].append(
            f"dark: no pixel of {pixels['images']} images is lighter than {lightest} of 255. Of 16 bits per channel, "
            "the higher 8 are kept, so scale images of 10 or 12 bits to 16"
        )
        print(card["notes"][-1], flush=True)
    text = json.dumps(card, indent=1, ensure_ascii=False)
    (folder / "card.json").write_text(text + "\n", encoding="utf-8")
    (folder / "card.md").write_text(_markdown(card), encoding="utf-8")


def _counts(dataset: Dataset, unusable: Sequence[Unusable], copies: pa.Table) -> dict[str, Any]:
    """Return the entries of card.json that count images."""
    info = dataset.info
    index = pa.concat_tables([dataset.index(split) for split in SPLITS])
    by_class = {
        split: np.bincount(each_label(dataset.index(split)), minlength=len(info.class_names)) for split in SPLITS
    }
    kinds = Counter(zip(copies["kind"].to_pylist(), copies["done"].to_pylist(), strict=True))
    sizes = {name: np.percentile(index[name].to_numpy(), (0, 50, 100)) for name in ("width", "height")}
    return {
        "name": info.name,
        "images": len(index),
        "splits": info.splits,
        "classes": [
            {"name": name} | {split: int(by_class[split][label]) for split in SPLITS}
            for label, name in enumerate(info.class_names)
        ],
        "bytes": pc.sum(index["length"]).as_py(),
        "formats": dict(Counter(index["format"].to_pylist()).most_common()),
        "channels": {str(number): count for number, count in Counter(index["channels"].to_pylist()).items()},
        "sizes": {
            name: dict(zip(("least", "median", "most"), map(int, values), strict=True))
            for name, values in sizes.items()
        },
        "copies": [{"kind": kind, "done": done, "images": n} for (kind, done), n in sorted(kinds.items())],
        "quarantine": dict(Counter(image.reason for image in unusable).most_common()),
        "notes": list(info.notes),
    }


def _pixels(dataset: Dataset, split: Split, rows: np.ndarray) -> dict[str, Any]:
    """Return the mean and standard deviation of each channel, scaled to values from 0 to 1."""
    size = dataset.info.image
    channels = size.channels if size else 3
    half = (0.5,) * channels
    side = min(SIDE, max(size.height, size.width)) if size else SIDE
    images = dataset.images(split, Preprocessing(mean=half, std=half, resolution=side, channels=channels), rows)
    counts = [np.bincount(images[..., channel].ravel(), minlength=256) for channel in range(channels)]
    levels = np.arange(256) / 255
    means = [np.average(levels, weights=count) for count in counts]
    deviations = [
        np.sqrt(np.average((levels - mean) ** 2, weights=count)) for mean, count in zip(means, counts, strict=True)
    ]
    lightest = max(int(np.flatnonzero(count)[-1]) for count in counts)
    return {"split": split, "images": len(rows), "side": side, "lightest": lightest} | {
        name: [round(float(value), 4) for value in values] for name, values in (("mean", means), ("std", deviations))
    }


def _contact_sheet(path: Path, dataset: Dataset, split: Split, rows: np.ndarray) -> list[str]:
    """Write the sheet, with one line of images per class; return the classes of the lines."""
    names = dataset.info.class_names
    lines = sample_rows(Images(dataset, dataset.index(split)).labels[rows] if names else np.arange(len(rows)) % _LINES)
    pictures = squares(dataset, split, rows[np.concatenate(list(lines.values()))])
    if (side := pictures.shape[1]) <= SMALL:
        pictures = pictures.repeat(2 * SMALL // side, axis=1).repeat(2 * SMALL // side, axis=2)
        side = pictures.shape[1]
    columns = max(map(len, lines.values()))
    sheet = np.full((len(lines) * (side + _GAP), columns * (side + _GAP), pictures.shape[-1]), 255, np.uint8)
    remaining = iter(pictures)
    for line, rows_of_class in enumerate(lines.values()):
        for column in range(len(rows_of_class)):
            top, start = line * (side + _GAP), column * (side + _GAP)
            sheet[top : top + side, start : start + side] = next(remaining)
    Image.fromarray(sheet.squeeze(-1) if sheet.shape[-1] == 1 else sheet).save(path, quality=88)
    return [names[label] for label in lines] if names else []


def _markdown(card: dict[str, Any]) -> str:
    sizes, pixels = card["sizes"], card["pixels"]
    span = " x ".join(f"{sizes[name]['least']}-{sizes[name]['most']}" for name in ("width", "height"))
    middle = " x ".join(str(sizes[name]["median"]) for name in ("width", "height"))
    classes = sorted(card["classes"], key=lambda row: -row["train"])
    splits = ", ".join(f"{card['splits'][split]:,} {split}" for split in SPLITS)
    lines = [
        f"# {_plain(card['name'])}",
        "",
        f"{card['images']:,} images {f'of {len(classes):,} classes' if classes else 'without labels'},"
        f" {card['bytes'] / 2**20:,.1f} MiB: {splits}.",
        f"Formats: {', '.join(f'{name} {count:,}' for name, count in card['formats'].items())}.",
        f"Pixels (width x height): {span}, half of them up to {middle}.",
        f"Mean {pixels['mean']}, standard deviation {pixels['std']} of values from 0 to 1, of {pixels['images']} "
        f"{pixels['split']} images at {pixels['side']} pixels a side.",
        "",
        *[f"- {_plain(note)}" for note in card["notes"]],
        *[f"- {copies_note(row['images'], row['kind'], row['done'])}" for row in card["copies"]],
        *[f"- {count:,} quarantined: {_plain(why)}" for why, count in list(card["quarantine"].items())[:SHOWN]],
        "",
    ]
    if not classes:
        return "\n".join([*lines, "![some of the images](contact_sheet.jpg)"]) + "\n"
    lines += [
        f"![a line for each of {len(card['contact_sheet'])} classes](contact_sheet.jpg)",
        "",
        f"Lines: {', '.join(map(_plain, card['contact_sheet']))}.",
        "",
        "| class | train | dev | test |",
        "|---|---:|---:|---:|",
        *[
            f"| {_plain(row['name'])} | {row['train']:,} | {row['dev']:,} | {row['test']:,} |"
            for row in classes[:SHOWN]
        ],
        *([f"| and {len(classes) - SHOWN:,} more | | | |"] if len(classes) > SHOWN else []),
    ]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Escape an untrusted name for Markdown, so that it cannot become a table, a link or a tag."""
    return "".join(f"\\{letter}" if letter in "\\`*_{}[]<>()#!|" else letter for letter in " ".join(text.split()))
