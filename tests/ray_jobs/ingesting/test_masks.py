"""Masks of an ingest: what they show, that they are read back, and that a bad one sets its image aside."""

import io
import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pipelines import identity
from pipelines.files.sources import source_files
from pipelines.spec import Ingest, ShapesSource
from pipelines.store import Layout, open_store
from ray_jobs import ingest
from ray_jobs.data.masks import IGNORED, decode_mask
from ray_jobs.data.shards import Dataset, open_dataset
from ray_jobs.sources.folder_masks import beside, drawn
from ray_jobs.sources.readers import shape_masks, shapes
from tests.support import archives
from tests.support.ingesting import in_tasks_here
from tests.support.records import make_context
from tests.support.vtab_natural import pets, tarred
from vit_model.errors import UserError

SHAPES: dict[str, Any] = {"kind": "shapes", "images": 30, "dev_images": 6, "test_images": 6, "resolution": 32}


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "in_tasks", in_tasks_here)


def ingested(source: dict[str, Any], folder: Path, **fields: Any) -> tuple[Dataset, str]:
    """The dataset, and its content digest."""
    config = Ingest.model_validate({"job": "ingest", "source": source} | fields)
    store = open_store(str(folder))
    digest = ingest.main(make_context(store, config)).content_digest
    return open_dataset(store.local(Layout.files("ingest", "k", 1), ())), digest


def png(pixels: np.ndarray, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", **options)
    return file.getvalue()


@pytest.mark.parametrize(("count", "resolution"), [(1, 64), (9, 96)])
def test_the_mask_of_a_drawn_image_is_where_its_figures_are(count: int, resolution: int) -> None:
    """Against the image: a pixel nearer to the figures' colour than to the background's is of the figures."""
    source = ShapesSource(kind="shapes", label="shape", max_count=count, resolution=resolution)
    for number in range(40):
        image, factors = shapes.render(source, number)
        mask = shape_masks.mask(source, number)
        assert set(np.unique(mask)) == {0, 1 + factors["shape"]}
        distance = np.abs(image.astype(int) - image[0, 0].astype(int)).sum(2)
        covered = distance / distance.max()  # edges are mixed of both colours
        assert (mask[covered < 0.45] == 0).all() and (mask[covered > 0.55] == 1 + factors["shape"]).all()
        assert (covered > 0.55).sum() > 10


def test_masks_are_only_read_if_asked_for_and_change_neither_shards_nor_keys(tmp_path: Path) -> None:
    plain, without = ingested(SHAPES, tmp_path / "plain")
    masked, digest = ingested(SHAPES | {"masks": True}, tmp_path / "masked")
    assert digest != without and plain.sample_ids("test") == masked.sample_ids("test")
    for name in ("index.parquet", "shards/00000.parquet"):
        assert (plain.folder / name).read_bytes() == (masked.folder / name).read_bytes()
    assert "mask_classes" not in json.loads((plain.folder / "dataset.json").read_text())
    assert not (plain.folder / "masks").exists()
    assert masked.info.mask_classes[:2] == ("background", "arrow")
    rows = masked.index("test")["key"].to_pylist()
    order = [4, 0, 2]
    for place, mask in zip(order, masked.masks("test", order), strict=True):
        expected = shape_masks.mask(ShapesSource(**SHAPES), int(rows[place].removeprefix("shape-")))
        np.testing.assert_array_equal(mask, expected)
    with pytest.raises(UserError, match="dataset Shapes has no masks; add `masks: true`"):
        next(plain.masks("test", [0]))
    assert ingested(SHAPES | {"masks": True}, tmp_path / "again")[1] == digest
    fields = identity.identity_fields(Ingest(job="ingest", source=ShapesSource(**SHAPES)))
    assert "masks" not in fields["source"]
    files = {flag: set(source_files(ShapesSource(**SHAPES, masks=flag))) for flag in (False, True)}
    assert (len(files[False]), len(files[True])) == (1, 2)


def test_a_changed_mask_is_another_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SHAPES | {"masks": True}
    _, digest = ingested(source, tmp_path / "before")
    monkeypatch.setattr(
        shape_masks, "masks", lambda *given: (np.zeros((32, 32), np.uint8) for _ in range(len(given[2])))
    )
    assert ingested(source, tmp_path / "after")[1] != digest


def test_a_trimap_is_a_pet_on_a_background_and_its_border_is_ignored(tmp_path: Path) -> None:
    """And a mask of another size, with another value, a bomb, no PNG or none at all sets its image aside."""
    pictures, files = pets()
    members = files_of(files["annotations.tar.gz"])
    header = png(np.zeros((4, 4), np.uint8))
    chunk = b"IHDR" + (60_000).to_bytes(4, "big") * 2 + header[24:29]
    bomb = header[:12] + chunk + zlib.crc32(chunk).to_bytes(4, "big") + header[33:]
    names = sorted(pictures)
    size = Image.open(io.BytesIO(pictures[names[1]])).size[::-1]
    hostile = {
        names[0]: png(np.ones((7, 9), np.uint8)),
        names[1]: png(np.full(size, 7, np.uint8)),
        names[2]: bomb,
        names[3]: pictures[names[3]],
        names[4]: b"",
        names[5]: png(np.ones((*size, 3), np.uint8)),
        names[6]: png(np.random.default_rng(0).integers(1, 3, size, np.uint8))[:90],
    }
    for name, data in hostile.items():
        members[f"annotations/trimaps/{name}.png"] = data
    del members[f"annotations/trimaps/{names[7]}.png"]
    files["annotations.tar.gz"] = tarred(members)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    source = {"kind": "vtab", "task": "oxford_iiit_pet", "subset": "whole", "root": str(tmp_path)}
    dataset, _ = ingested(source | {"masks": True}, tmp_path / "store", max_bad_fraction=0.5, max_distance=None)
    assert dataset.info.mask_classes == ("background", "pet")
    bad = pq.read_table(dataset.folder / "quarantine.parquet").to_pylist()
    reasons = {Path(row["key"]).stem: row["reason"] for row in bad}
    assert set(reasons) == set(names[:8])
    for name, message in zip(
        names,
        (
            "mask: its size is 9 x 7, the image's ",
            "mask: it has the value 7, not 1, 2 or 3",
            "mask: too many pixels (bomb)",
            "mask: not an image",
            "mask: empty file",
            "mask: pixels of Pillow's mode RGB; expected one value of 8 bits or fewer per pixel, its class",
            "mask: ",
            "mask: not in the archive",
        ),
        strict=False,
    ):
        assert reasons[name].startswith(message), (name, reasons[name])
    rows = dataset.index("test").to_pylist()
    for row, mask in zip(rows, dataset.masks("test", np.arange(len(rows))), strict=True):
        trimap = decode_mask(members[f"annotations/trimaps/{Path(row['key']).stem}.png"])
        assert mask.shape == (row["height"], row["width"])
        np.testing.assert_array_equal(mask == 1, trimap == 1)
        np.testing.assert_array_equal(mask == IGNORED, trimap == 3)
        np.testing.assert_array_equal(mask == 0, trimap == 2)


def files_of(archive: bytes) -> dict[str, bytes]:
    """The files in a tar."""
    import tarfile

    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {one.name: tar.extractfile(one).read() for one in tar.getmembers() if one.isfile()}


def test_reused_images_get_their_masks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second attempt reads no image again, and has the same masks."""
    config = Ingest.model_validate({"job": "ingest", "source": SHAPES | {"masks": True}})
    store = open_store(str(tmp_path))
    first = ingest.main(make_context(store, config))
    context = make_context(store, config)
    again = replace(context, attempt=context.attempt.model_copy(update={"number": 2}))
    monkeypatch.setattr(shapes, "render", None)
    assert ingest.main(again).content_digest == first.content_digest
    paths = [store.local(Layout.files("ingest", "k", number), ()) / "masks/00000.parquet" for number in (1, 2)]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert pq.read_schema(paths[0]).names == ["sample_id", "mask"]


@pytest.mark.parametrize(
    ("source", "fields", "message"),
    [
        ({"kind": "vtab", "task": "dtd", "root": "x", "masks": True}, {}, "only oxford_iiit_pet has them"),
        (SHAPES | {"masks": True}, {"short_side": 64}, "masks are of the original images' size"),
        ({"kind": "folder", "root": "x", "mask_classes": ["a", "b"]}, {"short_side": 64}, "masks are of the original"),
        (
            {"kind": "folder", "root": "x", "mask_classes": ["a", "b"], "boxes": "coco"},
            {},
            "boxes coco: the boxes have the labels; leave out mask_classes",
        ),
        ({"kind": "folder", "root": "x", "mask_classes": ["a", "b"], "labels": False}, {}, "leave out labels"),
        ({"kind": "folder", "root": "x", "masks": "coco"}, {}, "masks coco needs mask_classes"),
    ],
)
def test_fields_that_do_not_fit_are_named(source: Any, fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ingest.model_validate({"job": "ingest", "source": source} | fields)


@pytest.mark.parametrize("form", ["folders", "voc", "tar"])
def test_masks_beside_images_of_ones_own(form: str, tmp_path: Path) -> None:
    """In either order of folders, as Pascal VOC has them with its lists of splits, and in an archive."""
    rng, root = np.random.default_rng(0), tmp_path / "photos"
    expected, members, splits = {}, {}, {}
    for number in range(30):
        split = ("train", "val", "test")[number % 3]
        image = f"JPEGImages/{number}.jpg" if form == "voc" else f"images/{split}/{number}.jpg"
        mask = image.replace("JPEGImages", "SegmentationClass").replace("images", "masks").replace(".jpg", ".png")
        if form == "folders" and number % 2:
            image, mask = f"{split}/img/{number}.jpg", f"{split}/gt/{number}.png"
        values = rng.choice([0, 1, 2, IGNORED], (9 + number, 12)).astype(np.uint8)
        palette = Image.fromarray(values).convert("P") if form == "voc" else Image.fromarray(values)
        palette.putdata(values.ravel().tolist())
        file = io.BytesIO()
        palette.save(file, "PNG")
        photo = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (*values.shape, 3), np.uint8)).save(photo, "JPEG")
        members |= {image: photo.getvalue(), mask: file.getvalue()}
        expected[image], splits[image] = values, split
    if form == "voc":
        for split in ("train", "val", "test"):
            lines = [Path(image).stem for image, named in splits.items() if named == split]
            members[f"ImageSets/Segmentation/{split}.txt"] = "\n".join(lines).encode()
    members["JPEGImages/alone.jpg" if form == "voc" else "images/train/alone.jpg"] = photo.getvalue()
    del members[first := next(iter(expected))], expected[first]  # a mask without an image
    if form == "tar":
        root = tmp_path / "photos.tar"
        root.write_bytes(tarred({f"around/{name}": data for name, data in members.items()}, "w"))
    else:
        for name, data in members.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)
    source = {"kind": "folder", "root": str(root), "mask_classes": ["sky", "sea", "land"]}
    dataset, _ = ingested(source, tmp_path / "store", max_distance=None)
    assert dataset.info.mask_classes == ("sky", "sea", "land") and dataset.info.class_names == ()
    assert any("1 image without a mask, left out: " in note for note in dataset.info.notes)
    found = {}
    for split in ("train", "dev", "test"):
        keys = dataset.index(split)["key"].to_pylist()
        found |= dict(zip(keys, dataset.masks(split, range(len(keys))), strict=True))
        named = {"train": "train", "dev": "val", "test": "test"}[split]
        assert keys and all(splits[key] == named for key in keys)
    assert found.keys() == expected.keys()
    for key, mask in found.items():
        np.testing.assert_array_equal(mask, expected[key])


def test_values_that_mean_other_colours_are_refused(tmp_path: Path) -> None:
    """As a program numbers them that reduces the colours of each mask by itself."""
    red, black = [255, 0, 0], [0, 0, 0]
    for number, colours in enumerate((red + black, black + red, black + red)):
        for folder in ("images", "masks"):
            (tmp_path / "photos" / folder).mkdir(parents=True, exist_ok=True)
            image = Image.fromarray(np.arange(108, dtype=np.uint8).reshape(9, 12) % 2, "L").convert("P")
            image.putpalette(colours)
            image.save(tmp_path / f"photos/{folder}/{number}.png")
    source = {"kind": "folder", "root": str(tmp_path / "photos"), "mask_classes": ["background", "cell"]}
    blacks = r"\(0, 0, 0\) in the masks of images/1.png, images/2.png"
    with pytest.raises(UserError, match=rf"the value 0 as {blacks}; and as \(255, 0, 0\) in the masks of images/0.png"):
        ingested(source, tmp_path / "store", max_distance=None)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_grey_of_few_bits_keeps_its_values(bits: int) -> None:
    """A PNG by its specification, in which a pixel of `bits` bits has the values 0 to 2^bits - 1."""
    values = np.arange(2**bits, dtype=np.uint8)
    packed = np.unpackbits(values[:, None], axis=1)[:, 8 - bits :]
    header = struct.pack(">IIBBBBB", len(values), 1, bits, 0, 0, 0, 0)
    written = archives.png(IHDR=header, IDAT=zlib.compress(b"\0" + np.packbits(packed).tobytes()), IEND=b"")
    np.testing.assert_array_equal(decode_mask(written), values[None])


def test_objects_of_255_in_binary_masks_are_not_ignored_in_silence(tmp_path: Path) -> None:
    for number in range(4):
        mask = np.zeros((9, 12), np.uint8)
        mask[: 3 + number] = 255
        for folder, pixels in (("images", mask // 2), ("masks", mask)):
            (tmp_path / "photos" / folder).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(tmp_path / f"photos/{folder}/{number}.png")
    source = {"kind": "folder", "root": str(tmp_path / "photos"), "mask_classes": ["background", "cell"]}
    with pytest.raises(
        UserError, match=r"no mask has a pixel of cell, and 50\.0% .* value 255.*write 1 in their place"
    ):
        ingested(source, tmp_path / "store", max_distance=None)


@pytest.mark.parametrize("names", [("other", "cat", "dog"), ("dog", "cat")])
def test_masks_are_drawn_as_coco_outlines_objects(names: tuple[str, ...], tmp_path: Path) -> None:
    """Small objects before large ones, and crowds behind all; an image without objects is background."""
    categories, rng = ("cat", "dog"), np.random.default_rng(0)
    content: dict[str, Any] = {"images": [], "annotations": []}
    content["categories"] = [{"id": 5 * number, "name": name} for number, name in enumerate(categories, 1)]
    content["categories"].append({"id": 99, "name": "other"})  # some tools write one for the background
    expected = {}
    (tmp_path / "photos/train").mkdir(parents=True)
    background = 0 if "other" in names else IGNORED
    for number in range(12):
        width, height = rng.integers(12, 40, 2).tolist()
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(
            tmp_path / f"photos/train/{number}.png"
        )
        content["images"].append({"id": number, "file_name": f"{number}.png", "width": width, "height": height})
        mask, rectangles = np.full((height, width), background, np.uint8), []
        for _ in range(number % 5):
            (left, right), (top, bottom) = (sorted(rng.choice(side + 1, 2, False).tolist()) for side in (width, height))
            rectangles.append((left, top, right, bottom, int(rng.integers(2)), bool(rng.random() < 0.3)))
        for left, top, right, bottom, category, is_crowd in rectangles:
            corners = [left, top, right, top, right, bottom, left, bottom]
            whole = np.zeros((width, height), int)
            whole[left:right, top:bottom] = 1
            changes = np.flatnonzero(np.diff(whole.ravel(), prepend=0))
            runs = np.diff([0, *changes, whole.size]).tolist()
            content["annotations"].append(
                {"image_id": number, "category_id": 5 * category + 5, "bbox": [left, top, right - left, bottom - top]}
                | {"iscrowd": int(is_crowd)}
                | {"segmentation": {"counts": runs, "size": [height, width]} if is_crowd else [corners]}
            )
        for left, top, right, bottom, category, is_crowd in sorted(
            rectangles, key=lambda each: (not each[5], -(each[2] - each[0]) * (each[3] - each[1]))
        ):
            mask[top:bottom, left:right] = IGNORED if is_crowd else names.index(categories[category])
        expected[f"train/{number}.png"] = mask
    (tmp_path / "photos/train/_annotations.coco.json").write_text(json.dumps(content))
    source = {"kind": "folder", "root": str(tmp_path / "photos"), "masks": "coco", "mask_classes": names}
    dataset, _ = ingested(source, tmp_path / "store", max_distance=None)
    assert dataset.info.mask_classes == names and sum(dataset.info.splits.values()) == len(expected)
    for split in ("train", "dev", "test"):
        keys = dataset.index(split)["key"].to_pylist()
        for key, mask in zip(keys, dataset.masks(split, range(len(keys))), strict=True):
            np.testing.assert_array_equal(mask, expected[key], err_msg=key)
    with pytest.raises(UserError, match=r"masks coco: category 'dog' is not in mask_classes; did you mean 'dogs'"):
        ingested(source | {"mask_classes": ["cat", "dogs"]}, tmp_path / "store", max_distance=None)


@pytest.mark.parametrize(
    ("size", "outline", "message"),
    [
        (None, [[0, 0, 1, 1, 2, 2]], "its annotations are of None pixels"),
        ((10**6, 10**6), [[0, 0, 1, 1, 2, 2]], "its annotations are of 1000000 x 1000000 pixels"),
        ((8, 6), [[0, 0, 1, 1]], "neither polygons in the image nor a list of runs"),
        ((8, 6), [[0, 0, 1, 1, 1e9, 2]], "neither polygons"),
        ((8, 6), [[0, 0, 1, 1, float("nan"), 2]], "neither polygons"),
        ((8, 6), [[0, 0, 1, 1, True, 2]], "neither polygons"),
        ((8, 6), [], "neither polygons"),
        ((8, 6), None, "the segmentation None is neither polygons"),
        ((8, 6), {"counts": "PPYo0", "size": [6, 8]}, "neither polygons"),
        ((8, 6), {"counts": [48], "size": [8, 6]}, "neither polygons"),
        ((8, 6), {"counts": [4, 43], "size": [6, 8]}, "runs of 47 pixels; expected 48"),
        ((8, 6), {"counts": [-1, 49], "size": [6, 8]}, "runs of 48 pixels; expected 48"),
    ],
)
def test_an_outline_that_cannot_be_drawn_is_named(size: Any, outline: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        drawn(size, 0, [(1, outline)])


def test_a_mask_is_found_by_its_exact_name_and_there_is_one() -> None:
    images = ["train/Images/A.jpg", "train/Images/a.jpg", "train/Images/b.jpg"]
    files = [*images, "train/Masks/A.png", "train/Masks/a.png"]
    assert beside(images, files) == {images[0]: files[3], images[1]: files[4]}
    with pytest.raises(
        UserError, match=r"train/Images/a\.jpg has two masks, train/Masks/a\.png and train/labels/a\.png"
    ):
        beside(images, [*files, "train/labels/a.png"])


def test_a_folder_without_masks_says_where_they_belong(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images/1.png").write_bytes(png(np.zeros((8, 8), np.uint8)))
    source = {"kind": "folder", "root": str(tmp_path), "mask_classes": ["sky", "sea"]}
    with pytest.raises(UserError, match=r"no PNGs of masks, such as masks/train/1\.png for images/train/1\.jpg"):
        ingested(source, tmp_path / "store")


def test_a_missing_mask_is_damage(tmp_path: Path) -> None:
    dataset, _ = ingested(SHAPES | {"masks": True}, tmp_path)
    path = dataset.folder / "masks/00000.parquet"
    table = pq.read_table(path)
    dropped = dataset.sample_ids("test")[3]
    path.chmod(0o600)
    pq.write_table(table.filter(pa.array([name != dropped for name in table["sample_id"].to_pylist()])), path)
    with pytest.raises(UserError, match=f"no mask of image {dropped}; the dataset is damaged"):
        list(dataset.masks("test", [3]))
    path.write_bytes(b"")
    with pytest.raises(UserError, match="is missing or damaged"):
        list(dataset.masks("test", [3]))
