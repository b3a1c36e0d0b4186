"""Segmentation as a fine-tuning: its loss sees masks as images show them, its fits resume, its mIoU is of pixels."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from sklearn.metrics import jaccard_score
from torch.nn import functional

from pipelines.spec import Finetune, ModelSize
from pipelines.store import Layout, Manifest, Store, open_store
from ray_jobs import finetune
from ray_jobs.augment import CROPPING, TrainTransform
from ray_jobs.data.loader import Loader
from ray_jobs.data.masks import IGNORED
from ray_jobs.data.sampler import Sampler
from ray_jobs.data.shards import Dataset
from ray_jobs.evaluation.leakage import Overlap
from ray_jobs.evaluation.rows import CONFUSION_FILE, MEAN_IOU
from ray_jobs.process.context import Context
from ray_jobs.training import detecting, fit, segmenting
from ray_jobs.training.task import make_task
from tests.support.boxes import shown
from tests.support.finetuning import attempt_of, first_refit, kill_at, save_backbone
from tests.support.ingesting import ingest_here
from vit_model.contract import MODEL_FILES
from vit_model.errors import UserError
from vit_model.model import Segmenter
from vit_model.predict import answer
from vit_model.preprocessing import normalise
from vit_model.weights import load_model

SIZE = {"patch_size": 4, "width": 32, "depth": 1, "num_heads": 2}
NAMES = ("dark", "bright")
NONE = Overlap(np.zeros(8, bool), 0, 0, 0)


def halves(root: Path, is_square: bool = True) -> dict[str, Any]:
    """Images with a bright part at the left of an edge, whose masks say so; a row of each mask has no class."""
    rng = np.random.default_rng(0)
    for number in range(32):
        split = ("train", "train", "val", "test")[number % 4]
        height, width = (32, 32) if is_square else rng.integers(30, 60, 2)
        mask = np.tile(np.arange(width) < rng.integers(8, width - 8), (height, 1)).astype(np.uint8)
        image = np.where(mask, 200, 30)[..., None] + rng.integers(0, 20, (height, width, 3))
        mask[number % 30] = IGNORED
        for folder, pixels in (("images", image), ("masks", mask)):
            (root / folder / split).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(root / folder / split / f"{number}.png")
    return {"kind": "folder", "root": str(root), "mask_classes": [*NAMES]}


def configuration(**fields: Any) -> Finetune:
    base = {"job": "finetune", "masks": True, "data": "d", "model": SIZE, "resolution": 32, "learning_rates": [3e-3]}
    base |= {"steps": 12, "batch_size": 8, "checkpoint_every": {"steps": 5}}
    return Finetune.model_validate(base | fields)


@pytest.fixture
def photos(store: Store, tmp_path: Path) -> Manifest:
    return ingest_here(store, halves(tmp_path / "photos"), max_distance=None)


def attempt(store: Store, data: Manifest, number: int = 1, **fields: Any) -> Context[Finetune]:
    return attempt_of(store, configuration(**fields), data, number)


@pytest.mark.parametrize("is_square", [True, False], ids=["pixels", "files"])
@pytest.mark.parametrize("policy", sorted({"none", *CROPPING}))
def test_a_mask_is_cropped_as_its_image(policy: str, is_square: bool, store: Store, tmp_path: Path) -> None:
    """Against the pixels that the loader and the augmentation deliver, for crops of files and of loaded images."""
    source = halves(tmp_path / "photos", is_square)
    given = attempt(store, ingest_here(store, source, max_distance=None), augment=policy)
    dataset = given.dataset()
    task = make_task(given.config, dataset, None)
    images = detecting.Numbered(dataset, dataset.index("train"))
    masks = [*dataset.masks("train", np.arange(len(images.rows)))]
    transform = TrainTransform(given.config, 3, 0, dataset.info.image is None)
    sizes = np.array([mask.shape[::-1] for mask in masks])
    preprocessing, sampler = task.contract.preprocessing, Sampler(images, seed=3, batch_size=8)
    with Loader(images, sampler, preprocessing, crop=transform.crop) as batches:
        for _, (positions, pixels, rows) in zip(range(10), batches, strict=False):
            (views,), targets = transform(pixels, rows, positions, 0)
            crops = detecting.crops_of(transform, positions, sizes[targets.numpy()], 32)
            for view, row, crop, is_flipped in zip(views.numpy(), targets.tolist(), *crops, strict=True):
                mask = segmenting.in_crop(masks[row], crop, is_flipped, 32)
                known = (mask != IGNORED) & shown(crop, sizes[row], 32, is_flipped)
                wrong = (view.mean(axis=2) > 120)[known] != mask[known]
                assert wrong.sum() <= 1.5 * known.any(axis=1).sum(), "at most the column of the edge"


def test_the_loss_is_the_mean_over_images_of_their_known_pixels() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(3, 4, 2, 2))).float()
    masks = torch.from_numpy(rng.choice([0, 1, 2, 3, IGNORED], (3, 8, 8)).astype(np.uint8))
    masks[2] = IGNORED
    found = segmenting.losses(logits, masks)
    large = functional.interpolate(logits, (8, 8), mode="bilinear")
    for image in range(2):
        known = masks[image] != IGNORED
        expected = functional.cross_entropy(large[image][:, known].T, masks[image][known].long())
        assert float(found[image]) == pytest.approx(float(expected), rel=1e-5)
    assert found[2] == 0
    weights = torch.tensor([1.0, 2.0, 0.5, 3.0])
    weighted, known = segmenting.losses(logits, masks, weights), masks[0] != IGNORED
    each = functional.cross_entropy(large[0][:, known].T, masks[0][known].long(), reduction="none")
    assert float(weighted[0]) == pytest.approx(float((each * weights[masks[0][known].long()]).mean()), rel=1e-5)


def test_balanced_weights_count_the_pixels_of_the_training_images(store: Store, photos: Manifest) -> None:
    given = attempt(store, photos, class_weights="balanced")
    dataset = given.dataset()
    task, (pool,) = make_task(given.config, dataset, None), finetune.labelled(given.config, dataset)[0]
    counts = np.zeros(256)
    for split in ("train", "dev"):
        for mask in dataset.masks(split, np.arange(dataset.info.splits[split])):
            counts += np.bincount(mask.ravel(), minlength=256)
    expected = counts[:2].sum() / (2 * counts[:2])
    np.testing.assert_allclose(fit.class_weights(task, pool), expected, rtol=1e-5)
    with pytest.raises(UserError, match="class_weights: the data has no class 'light'"):
        make_task(configuration(class_weights={"light": 2.0}), dataset, None)


@pytest.mark.parametrize("fields", [{}, {"freeze": "backbone"}, {"lora": {"rank": 2}}], ids=str)
def test_a_killed_fit_ends_with_the_same_bytes(
    fields: dict[str, Any], store: Store, photos: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fields:
        backbone = tmp_path / "backbone"
        save_backbone(backbone, ModelSize.model_validate(SIZE), 32, channels=3)
        monkeypatch.setattr(Context, "input", lambda *_: backbone)
        fields = {"model": None, "backbone": "b"} | fields
    _, _, expected = first_refit(attempt(store, photos, **fields))
    kept = [(store.local(Layout.files("finetune", "k", 1), ()) / name).read_bytes() for name in MODEL_FILES]
    other = open_store(f"{store.uri}-2")
    data = ingest_here(other, halves(tmp_path / "again"), max_distance=None)

    kill_at(8, monkeypatch, lambda: first_refit(attempt(other, data, **fields)))
    _, _, resumed = first_refit(attempt(other, data, number=2, **fields))
    assert [(other.local(Layout.files("finetune", "k", 2), ()) / name).read_bytes() for name in MODEL_FILES] == kept
    assert resumed.images.equals(expected.images)


def test_micro_batches_do_not_change_the_training(photos: Manifest, tmp_path: Path) -> None:
    weights = []
    for parts in (1, 4):
        other = open_store(str(tmp_path / str(parts)))
        data = ingest_here(other, halves(tmp_path / "photos"), max_distance=None)
        exact = {"dtype": "float32", "optimizer": {"name": "sgd"}}
        first_refit(attempt(other, data, gradient_accumulation_steps=parts, **exact))
        weights.append(load_model(other.local(Layout.files("finetune", "k", 1), ()))[0].state_dict())
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], atol=1e-5, rtol=1e-4, msg=name)


def test_what_is_written_is_the_miou_of_the_saved_models_pixels(store: Store, photos: Manifest) -> None:
    """As scikit-learn counts it; the model learns the edge, and is not taken for a classifier of images."""
    given = attempt(store, photos, steps=60, class_weights="balanced")
    task, dataset, done = first_refit(given)
    rows, predictions, files = finetune.tables(task, dataset, [done], "dev", NONE)
    (row,), (table,) = rows, files[CONFUSION_FILE]
    folder = store.local(Layout.files("finetune", "k", 1), ())
    model, contract = load_model(folder)
    assert isinstance(model, Segmenter) and contract.mask_classes == NAMES and not contract.class_names
    pixels = dataset.images("test", contract.preprocessing, np.arange(8))
    with torch.no_grad():
        logits = model(normalise(torch.from_numpy(pixels), contract.preprocessing, torch.float32))
    found = functional.interpolate(logits, (32, 32), mode="bilinear").argmax(dim=1).numpy()
    masks = np.stack([*dataset.masks("test", np.arange(8))])
    known = masks != IGNORED
    expected = jaccard_score(masks[known], found[known], average="macro")
    assert row["metric"] == MEAN_IOU and row["value"] == pytest.approx(expected) and expected > 0.8
    assert done.record.metrics == {MEAN_IOU: row["value"]} and predictions == []
    assert json.loads(row["settings"])["class_weights"] == "balanced"
    right = pa.compute.equal(table["label"], table["prediction"])
    assert pa.compute.sum(table["pixels"].filter(right)).as_py() == (found == masks)[known].sum()
    with pytest.raises(UserError, match="classifies pixels"):
        answer(model, contract, pixels)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mixup": 0.2}, "mixup: masks true has no such setting"),
        ({"model": {"family": "resnet", "units": [1]}}, "masks true: a ResNet has no tokens of patches"),
    ],
)
def test_settings_that_do_not_fit_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configuration(**fields)


def test_what_cannot_segment_is_the_users_mistake(store: Store, photos: Manifest) -> None:
    dataset = attempt(store, photos).dataset()
    for option in ({"pooling": "map"}, {"distillation": True}):
        whole, trained = fit.parameters(make_task(configuration(model=SIZE | option), dataset, None))
        assert trained < whole, "nothing depends on the pooling, or on the distillation token's head"
    without = Dataset(dataset.folder, dataset.info.model_copy(update={"mask_classes": ()}), dataset._shards)
    with pytest.raises(UserError, match="has no masks"):
        make_task(configuration(), without, None)
