"""Linear segmentation: its sums, its fit and its mIoU against independent computations; and a planted case."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from sklearn.linear_model import Ridge
from sklearn.metrics import confusion_matrix, jaccard_score
from sklearn.preprocessing import StandardScaler

from pipelines import store as st
from pipelines.spec import ModelSize, ResNetSize, Segment
from pipelines.store import Manifest, Store, open_store
from ray_jobs import segment
from ray_jobs.data.masks import IGNORED
from ray_jobs.data.shards import Dataset, open_dataset
from ray_jobs.evaluation import tokens
from ray_jobs.evaluation.metrics import mean_iou
from ray_jobs.evaluation.rows import CONFUSION, MOST_FREQUENT
from ray_jobs.evaluation.segmentation import Moments, confusion, shares_of_patches
from ray_jobs.reporting import measures
from ray_jobs.reporting.verdicts import verdicts
from tests.support.checkpoints import put_untrained
from tests.support.ingesting import ingest_here
from tests.support.records import make_context
from tests.support.vtab_natural import pets
from vit_model.errors import UserError


@pytest.mark.parametrize("balance", [0.0, 0.5, 1.0])
def test_the_fit_is_scikit_learns_ridge_over_pixels(balance: float) -> None:
    """Each pixel with a class is an example; scikit-learn's penalty is on a sum, so it is as large as the weights."""
    rng = np.random.default_rng(0)
    tokens, parts = rng.normal(2, 3, (12, 4)), []
    masks = [rng.choice([0, 0, 0, 1, 2, IGNORED], (8, 6)).astype(np.uint8) for _ in range(2)]
    for number, mask in enumerate(masks):
        own = tokens[6 * number : 6 * number + 6]
        parts.append(Moments.of(own, shares_of_patches(mask, (2, 3), 3)))
    inputs, labels = [], []
    for number, mask in enumerate(masks):
        for y, x in zip(*np.nonzero(mask != IGNORED), strict=True):
            inputs.append(tokens[6 * number + 3 * (y // 4) + x // 2])
            labels.append(mask[y, x])
    weights = (np.bincount(labels) / len(labels))[labels] ** -balance
    scaler = StandardScaler().fit(inputs, sample_weight=weights)
    variants = [(balance, 0.01), (balance, 10.0)]
    for (_, l2), found in zip(variants, (parts[0] + parts[1]).fit(variants), strict=True):
        ridge = Ridge(l2 * weights.sum()).fit(scaler.transform(inputs), np.eye(3)[labels], weights)
        expected = ridge.predict(scaler.transform(tokens))
        np.testing.assert_allclose(tokens @ found[:-1] + found[-1], expected, atol=1e-4)


def test_shares_are_those_of_the_area() -> None:
    """Of a mask whose pixels are divided between patches: repeated, until patches are whole pixels."""
    mask = np.random.default_rng(1).choice([0, 1, IGNORED], (5, 7)).astype(np.uint8)
    fine = np.kron(mask, np.ones((3, 2), np.uint8)).reshape(3, 5, 2, 7)
    for number in range(2):
        expected = (fine == number).mean(axis=(1, 3)).ravel()
        np.testing.assert_allclose(shares_of_patches(mask, (3, 2), 2)[:, number], expected, atol=1e-12)


def test_the_mean_iou_is_scikit_learns_jaccard_score() -> None:
    """Scores resized by Pillow instead; ignored pixels do not count, nor classes that are in no mask."""
    rng = np.random.default_rng(2)
    mask = rng.choice([0, 1, 3, IGNORED], (20, 12)).astype(np.uint8)
    scores = rng.normal(size=(2, 5, 4, 4)).astype(np.float32)
    scores[1, ..., 2] = -9  # only the first method predicts the class that is in no mask
    for own, counts in zip(scores, confusion(scores, mask), strict=True):
        large = [
            np.asarray(Image.fromarray(own[..., number]).resize((12, 20), Image.Resampling.BILINEAR))
            for number in range(4)
        ]
        predictions, known = np.argmax(large, axis=0), mask != IGNORED
        expected = confusion_matrix(mask[known], predictions[known], labels=range(4))
        np.testing.assert_array_equal(counts, expected)
        jaccard = jaccard_score(mask[known], predictions[known], labels=np.unique(mask[known]), average="macro")
        assert mean_iou(counts) == pytest.approx(jaccard)


# ---- the stage


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return open_store(str(tmp_path_factory.mktemp("store")))


@pytest.fixture(scope="module")
def shapes(store: Store) -> Manifest:
    """Drawn shapes with masks, ingested without Ray."""
    source = {"kind": "shapes", "images": 150, "dev_images": 20, "test_images": 20, "resolution": 32}
    source |= {"max_count": 9, "masks": True}
    return ingest_here(store, source, max_distance=None)


def put_model(store: Store, data: Manifest, size: Any, key: str) -> Manifest:
    """An untrained model that takes these images."""
    return put_untrained(store, data, key, size=size, resolution=32, seed=9)


def segmented(store: Store, data: Manifest, backbone: Manifest, **fields: Any) -> tuple[list[Any], list[Any], Any]:
    """Rows, confusions, and the result."""
    config = Segment(job="segment", data="d", backbone="m", **fields)
    result = segment.segment(make_context(store, config, data=data, backbone=backbone))
    folder = store.local(st.Layout.files("segment", "k", 1), ())
    return (
        pq.read_table(folder / "rows.parquet").to_pylist(),
        pq.read_table(folder / "confusion.parquet").to_pylist(),
        result,
    )


@pytest.mark.parametrize("size", [ModelSize(patch_size=4, width=16, depth=1, num_heads=2), ResNetSize(units=(1,))])
def test_rows_are_those_of_the_confusions_of_each_kind_of_tokens(store: Store, shapes: Manifest, size: Any) -> None:
    key = type(size).__name__
    found, pixels, result = segmented(store, shapes, put_model(store, shapes, size, key))
    family = "ViT" if key == "ModelSize" else "ResNet"
    untrained = [(f"{family}, untrained", draw) for draw in range(3)]
    learned = f"{family}, trained on these images"
    assert [(row["method"], row["draw"]) for row in found] == [
        (learned, 0),
        *untrained,
        ("pixels", 0),
        (MOST_FREQUENT, 0),
    ]
    dataset = open_dataset(st.local_files(store, shapes))
    truth = np.concatenate([mask.ravel() for mask in dataset.masks("test", np.arange(20))])
    names = dataset.info.mask_classes
    for row in found:
        assert (row["metric"], row["protocol"], row["num_images"]) == ("mIoU", "linear segmentation", 20)
        own = [one for one in pixels if (one["method"], one["draw"]) == (row["method"], row["draw"])]
        assert sum(one["pixels"] for one in own) == len(truth)
        counts = np.zeros((9, 9), int)
        for one in own:
            counts[names.index(one["label"]), names.index(one["prediction"])] += one["pixels"]
        np.testing.assert_array_equal(counts.sum(1), np.bincount(truth, minlength=9))
        assert row["value"] == mean_iou(counts)
    assert {row["selected_on"] for row in found} == {"dev", "nothing"}
    assert json.loads(found[0]["settings"])["patches"] == [8, 8]
    assert {one["prediction"] for one in pixels if one["method"] == MOST_FREQUENT} == {"background"}
    assert result.metrics[f"{learned}, mIoU @ all, linear segmentation"] == found[0]["value"]
    given = pa.Table.from_pylist(pixels, CONFUSION)
    for column in ("stage", "artifact"):
        given = given.append_column(column, pa.repeat(column, len(given)))
    entries = {entry.method: entry for entry in measures.of_pixels(given)}
    for method, entry in entries.items():
        own = [row["value"] for row in found if row["method"] == method]
        value, low, high = entry.interval("mIoU")
        assert value == pytest.approx(np.mean(own)) and low < value < high and len(entry.draws) == len(own)
    classes = measures.by_class(entries[learned], measures.classes_of_pixels(given))
    shares = np.bincount(truth, minlength=9) / len(truth)
    assert {each["name"]: each["share"] for each in classes} == pytest.approx(dict(zip(names, shares, strict=True)))
    assert np.mean([each["IoU"] for each in classes]) == pytest.approx(entries[learned].interval("mIoU").value)
    values = {method: entry.interval("mIoU").value for method, entry in entries.items()}
    judged = entries[learned].minus(entries[untrained[0][0]], "mIoU")
    assert judged.value == pytest.approx(values[learned] - values[untrained[0][0]]) and judged.low < judged.value
    best = max(("pixels", MOST_FREQUENT), key=values.__getitem__)
    (verdict,) = verdicts(
        [replace(entries[learned], method="ViT, pretrained"), entries["pixels"], entries[MOST_FREQUENT]]
    )
    assert (verdict.reference.method, verdict.value) == (best, pytest.approx(values[learned]))


def test_tokens_that_are_the_mask_give_all_of_it_and_pixels_do_not(
    store: Store, shapes: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted backbone, whose tokens are the classes' shares, is as right as the size of its patches allows."""
    size = ModelSize(patch_size=2, width=16, depth=1, num_heads=2)
    monkeypatch.setattr(tokens, "INITIALISATIONS", 0)
    whole = tokens._batches

    def planted(*given: Any) -> Any:
        for kinds, masks in whole(*given):
            shares = [shares_of_patches(mask, kinds[0].grid, kinds[0].num_classes) for mask in masks]
            yield [kinds[0]._replace(flat=np.concatenate(shares)), *kinds[1:]], masks

    monkeypatch.setattr(tokens, "_batches", planted)
    found, _, _ = segmented(store, shapes, put_model(store, shapes, size, "planted"))
    by_method = {row["method"]: row["value"] for row in found}
    assert by_method["ViT, trained on these images"] > 0.7 > 5 * by_method["pixels"]


def test_pets_from_their_archives_are_scored_at_the_size_of_their_trimaps(tmp_path: Path) -> None:
    """Image files of several sizes and shapes, squashed to the model's square; the trimaps' borders do not count."""
    for name, data in pets()[1].items():
        (tmp_path / name).write_bytes(data)
    source = {
        "kind": "vtab",
        "task": "oxford_iiit_pet",
        "subset": "whole",
        "root": str(tmp_path),
        "masks": True,
    }
    store = open_store(str(tmp_path / "store"))
    data = ingest_here(store, source, max_distance=None)
    size = ModelSize(patch_size=4, width=16, depth=1, num_heads=2)
    found, pixels, _ = segmented(store, data, put_model(store, data, size, "pets"))
    assert {row["task"] for row in found} == {"Pets, whole"} and len(found) == 6
    dataset = open_dataset(st.local_files(store, data))
    ids = dataset.sample_ids("test")
    masks = dict(zip(ids, dataset.masks("test", np.arange(len(ids))), strict=True))
    for identity in ids:
        own = [one for one in pixels if one["sample_id"] == identity and one["method"] == "pixels"]
        for label, name in enumerate(("background", "pet")):
            counted = sum(one["pixels"] for one in own if one["label"] == name)
            assert counted == (masks[identity] == label).sum() > 0


def test_images_of_ones_own_need_no_labels(tmp_path: Path) -> None:
    """Pixels tell a bright part of an image from a dark one."""
    rng, root = np.random.default_rng(0), tmp_path / "photos"
    for number in range(24):
        split, edge = ("train", "train", "val", "test")[number % 4], 4 * rng.integers(2, 7)
        mask = np.arange(32) < edge
        image = np.where(mask, 200, 30)[None, :, None] + rng.integers(0, 20, (32, 32, 3))
        for folder, pixels in (("images", image), ("masks", np.tile(mask, (32, 1)))):
            (root / folder / split).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(root / folder / split / f"{number}.png")
    store = open_store(str(tmp_path / "store"))
    source = {"kind": "folder", "root": str(root), "mask_classes": ["dark", "bright"]}
    data = ingest_here(store, source, max_distance=None)
    model = put_model(store, data, ModelSize(patch_size=4, width=16, depth=1, num_heads=2), "own")
    found, pixels, _ = segmented(store, data, model)
    best = {row["method"]: row["value"] for row in found}
    assert best["pixels"] > 0.95 > 0.7 > best[MOST_FREQUENT]
    assert {one["label"] for one in pixels} == {"dark", "bright"}


def test_l2_is_never_chosen_on_test(store: Store, shapes: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other masks of test, the same settings."""
    model = put_model(store, shapes, ModelSize(patch_size=8, width=16, depth=1, num_heads=2), "l2")
    before, _, _ = segmented(store, shapes, model)
    honest = Dataset.masks
    monkeypatch.setattr(
        Dataset,
        "masks",
        lambda self, split, rows: (mask[::-1] if split == "test" else mask for mask in honest(self, split, rows)),
    )
    after, _, _ = segmented(store, shapes, model)
    assert [row["settings"] for row in before] == [row["settings"] for row in after]
    assert before[0]["value"] != after[0]["value"]


def test_data_without_masks_is_named(store: Store, tmp_path: Path, shapes: Manifest) -> None:
    source = {"kind": "shapes", "images": 30, "dev_images": 4, "test_images": 6, "resolution": 32}
    other = open_store(str(tmp_path))
    plain = ingest_here(other, source)
    model = put_model(other, plain, ModelSize(patch_size=8, width=16, depth=1, num_heads=2), "m")
    with pytest.raises(UserError, match="dataset Shapes has no masks; add `masks: true` to its source"):
        segmented(other, plain, model)
