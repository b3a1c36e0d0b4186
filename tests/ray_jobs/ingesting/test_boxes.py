"""Boxes of an ingest: the same from every form of annotations, with the data set's splits and its digest."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pipelines.spec import Ingest
from pipelines.store import Layout, open_store
from ray_jobs import ingest
from ray_jobs.data.boxes import Box
from ray_jobs.data.shards import Dataset, open_dataset
from ray_jobs.sources import catalog
from tests.support.boxes import BOXES, CLASSES, FORMS, HEIGHT, WIDTH, kitti, made
from tests.support.ingesting import in_tasks_here
from tests.support.records import make_context
from vit_model.errors import UserError


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "in_tasks", in_tasks_here)


def ingested(source: dict[str, Any], store: Path, number: int = 1, **fields: Any) -> tuple[Dataset, str]:
    """The dataset, and its content digest."""
    config = Ingest.model_validate({"job": "ingest", "source": source} | fields)
    opened = open_store(str(store))
    context = make_context(opened, config)
    again = replace(context, attempt=context.attempt.model_copy(update={"number": number}))
    digest = ingest.main(again).content_digest
    return open_dataset(opened.local(Layout.files("ingest", "k", number), ())), digest


def boxes_of(dataset: Dataset) -> dict[str, list[Box]]:
    return {
        Path(key).with_suffix("").as_posix(): boxes
        for split in ("train", "dev", "test")
        for key, boxes in zip(dataset.index(split)["key"].to_pylist(), dataset.boxes(split), strict=True)
    }


def test_all_forms_give_the_same_data_set(tmp_path: Path) -> None:
    digests = set()
    for form in FORMS:
        dataset, digest = ingested(made(tmp_path / form, form), tmp_path / f"store-{form}")
        assert boxes_of(dataset) == BOXES
        assert dataset.info.class_names == CLASSES and dataset.info.splits == {"train": 2, "dev": 1, "test": 1}
        assert sorted(dataset.index("train")["labels"].to_pylist()) == [[], [0, 1]]
        assert "3 boxes" not in (dataset.folder / "card.md").read_text()
        assert "4 boxes of objects, 1.0 per image on average; 1 image without any" in dataset.info.notes
        digests.add(digest)
    assert len(digests) == 1


def test_a_moved_box_is_another_data_set_and_no_image_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = made(tmp_path / "root", "kitti")
    _, before = ingested(source, tmp_path / "store")
    moved = BOXES | {"val/3": [Box(29, 10, 40, 20, 0)]}
    kitti(tmp_path / "root", moved)
    monkeypatch.setattr(catalog, "images", lambda *given: iter(()))
    dataset, after = ingested(source, tmp_path / "store", number=2)
    assert after != before and boxes_of(dataset) == moved


def test_a_box_that_cannot_be_sets_its_image_aside(tmp_path: Path) -> None:
    bad = {"train/5": [Box(50, 0, 60, 10, 0)], "train/6": [Box(3, 3, 3, 9, 1)]}
    source = made(tmp_path / "root", "kitti", BOXES | bad)
    dataset, _ = ingested(source, tmp_path / "store", max_bad_fraction=0.5)
    assert boxes_of(dataset) == BOXES
    rows = pq.read_table(dataset.folder / "quarantine.parquet").to_pylist()
    assert {row["key"]: row["reason"] for row in rows} == {
        "train/5.png": "boxes: box [50, 0, 60, 10] is outside the image of 40 x 20 pixels",
        "train/6.png": "boxes: box [3, 3, 3, 9] has no area: x1, y1, x2, y2 should ascend",
    }


def test_the_contact_sheet_shows_the_boxes(tmp_path: Path) -> None:
    """A grey image has no colours; the outline of its box has."""
    source = made(tmp_path / "root", "kitti")
    for name in BOXES:
        Image.new("L", (WIDTH, HEIGHT), 128).save(tmp_path / "root" / f"{name}.png")
    dataset, _ = ingested(source, tmp_path / "store", max_distance=None)
    sheet = np.asarray(Image.open(io.BytesIO((dataset.folder / "contact_sheet.jpg").read_bytes())), int)
    assert np.ptp(sheet, axis=2).max() > 100


def test_fields_that_do_not_fit_are_named(tmp_path: Path) -> None:
    source = {"kind": "folder", "root": "x", "boxes": "coco"}
    for more, message in (
        ({"multi_label": True}, "boxes coco: the boxes have the labels; leave out multi_label"),
        ({"boxes": "coc"}, "boxes"),
    ):
        with pytest.raises(ValueError, match=message):
            Ingest.model_validate({"job": "ingest", "source": source | more})
    with pytest.raises(ValueError, match="boxes are of the original images' size; remove short_side, or"):
        Ingest.model_validate({"job": "ingest", "source": source, "short_side": 64})
    with pytest.raises(UserError, match=r"root: source.boxes coco: no JSON file with COCO's annotations"):
        ingested(made(tmp_path / "root", "kitti") | {"boxes": "coco"}, tmp_path / "store")
