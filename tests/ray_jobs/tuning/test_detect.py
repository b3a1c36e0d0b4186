"""Detection as a fine-tuning: its loss sees boxes where the images show them, its fits resume, its AP is COCO's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from faster_coco_eval import COCO, COCOeval_faster

from pipelines.spec import Detect, ModelSize, Promote
from pipelines.store import Layout, Manifest, Store, open_store, read_manifest
from ray_jobs import finetune
from ray_jobs.augment import CROPPING, TrainTransform
from ray_jobs.data.boxes import Box
from ray_jobs.data.loader import Loader
from ray_jobs.data.sampler import Sampler
from ray_jobs.data.shards import Dataset, Images
from ray_jobs.detection import entries
from ray_jobs.detection.tables import DETECTIONS, FILE
from ray_jobs.evaluation.leakage import Overlap
from ray_jobs.evaluation.rows import MEDIAN_BOX
from ray_jobs.process.context import Context
from ray_jobs.promote import promote
from ray_jobs.reporting import detections as reported
from ray_jobs.reporting.verdicts import sentence, verdicts
from ray_jobs.training import detecting, fit
from ray_jobs.training.task import at_point, make_task
from ray_jobs.tuning import detections, fits
from tests.support.boxes import boxed_photos, shown
from tests.support.finetuning import attempt_of, first_refit, kill_at, save_backbone
from tests.support.ingesting import ingest_here
from tests.support.records import committed, make_context
from vit_model.contract import MODEL_FILES
from vit_model.detection.detector import load_detector, save_detector
from vit_model.errors import UserError
from vit_model.weights import load_model

SIZE = {"patch_size": 8, "width": 32, "depth": 1, "num_heads": 2}
SCENES = {"kind": "scenes", "figures": "shapes", "images": 24, "dev_images": 6, "test_images": 12, "resolution": 32}
SGD = {"name": "sgd"}  # AdamW would amplify the rounding of biases before a norm, which have no gradient
NONE = Overlap(np.zeros(12, bool), 0, 0, 0)


def configuration(**fields: Any) -> Detect:
    base = {
        "job": "detect",
        "data": "scenes",
        "model": SIZE,
        "resolution": 32,
        "learning_rates": [3e-3],
        "steps": 12,
        "batch_size": 8,
        "channels": 32,
        "convs": 1,
        "scales": [2, 1],
        "checkpoint_every": {"steps": 5},
    }
    return Detect.model_validate(base | fields)


@pytest.fixture
def scenes(store: Store) -> Manifest:
    return ingest_here(store, SCENES)


def attempt(store: Store, data: Manifest, number: int = 1, **fields: Any) -> Context[Detect]:
    return attempt_of(store, configuration(**fields), data, number)


@pytest.mark.parametrize("stored", ["files", "pixels"])
@pytest.mark.parametrize("policy", sorted({"none", *CROPPING}))
def test_the_loss_sees_a_box_where_the_image_shows_it(policy: str, stored: str, store: Store, tmp_path: Path) -> None:
    """Against the pixels that the loader and the augmentation deliver, for crops of files and of loaded images."""
    source = SCENES | {"max_count": 1, "resolution": 48} if stored == "pixels" else boxed_photos(tmp_path / "photos")
    given = attempt(store, ingest_here(store, source, max_distance=None), augment=policy, resolution=64)
    dataset = given.dataset()
    task = make_task(given.config, dataset, None)
    images = detecting.Numbered(dataset, dataset.index("train"))
    transform = TrainTransform(given.config, 3, 0, dataset.info.image is None)
    sizes = np.stack([images.rows[name].to_numpy() for name in ("width", "height")], axis=1)
    boxes, seen = dataset.boxes("train"), 0
    with Loader(
        images, Sampler(images, seed=3, batch_size=8), task.contract.preprocessing, crop=transform.crop
    ) as all_:
        for _, (positions, pixels, rows) in zip(range(20), all_, strict=False):
            (views,), targets = transform(pixels, rows, positions, 0)
            crops = detecting.crops_of(transform, positions, sizes[targets.numpy()], 64)
            for view, row, crop, is_flipped in zip(views.numpy(), targets.tolist(), *crops, strict=True):
                truth = detecting.truth(boxes[row], crop, is_flipped, 64, torch.device("cpu"))
                if not len(truth.boxes) or truth.ignored.any():
                    continue
                inside = shown(crop, sizes[row], 64, is_flipped)
                background = np.median(view[inside], axis=0) if stored == "pixels" else np.zeros(3)
                distance = np.abs(view.astype(float) - background).sum(axis=2) * inside
                y, x = np.nonzero(distance > 0.5 * distance.max())
                found = np.array([x.min(), y.min(), x.max() + 1, y.max() + 1])
                box, inward = truth.boxes[0].numpy(), np.array([1, 1, -1, -1])
                near = 1 + 1.5 * 64 / crop[2:].min()  # pixels of the stored image, enlarged
                near += 0.5 * (crop[2:] > sizes[row][::-1]).any()  # where a smaller image is put is rounded
                if box[:2].min() > 0 and box[2:].max() < 64:
                    assert np.abs(found - box).max() <= near, (found, box)
                    seen += 1
                elif min(box[2:] - box[:2]) < 50:  # otherwise the background is not seen
                    assert (inward * (found - box)).min() >= -near, (found, box)
    assert seen > 8


def test_boxes_that_a_crop_hardly_shows_are_not_learned() -> None:
    boxes = [Box(0, 0, 10, 10, 1), Box(8, 8, 20, 20, 2), Box(90, 90, 99, 99, 3), Box(30, 30, 50, 40, 4, ignored=True)]
    truth = detecting.truth(boxes, np.array([8.0, 8.0, 40.0, 40.0]), True, 80, torch.device("cpu"))
    assert truth.classes.tolist() == [1, 2, 4] and truth.ignored.tolist() == [True, False, True]
    assert truth.boxes.tolist() == [[76, 0, 80, 4], [56, 0, 80, 24], [0, 44, 36, 64]]


@pytest.mark.parametrize("freeze", [None, "backbone"])
def test_a_killed_fit_ends_with_the_same_bytes(
    freeze: str | None, store: Store, scenes: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: dict[str, Any] = {}
    if freeze is not None:
        backbone = store.local("", ()) / "backbone"
        save_backbone(backbone, ModelSize.model_validate(SIZE), 32, channels=3)
        monkeypatch.setattr(Context, "input", lambda *_: backbone)
        fields = {"model": None, "backbone": "b", "freeze": freeze}
    whole = attempt(store, scenes, **fields)
    _, _, expected = first_refit(whole)
    files = [store.local(Layout.files("detect", "k", 1), ()) / name for name in MODEL_FILES]
    kept = [file.read_bytes() for file in files]
    (store_2 := open_store(f"{store.uri}-2")).create("x", b"")  # another store, in which the first attempt is killed
    data = ingest_here(store_2, SCENES)

    kill_at(8, monkeypatch, lambda: first_refit(attempt(store_2, data, **fields)))
    _, _, resumed = first_refit(attempt(store_2, data, number=2, **fields))
    again = [store_2.local(Layout.files("detect", "k", 2), ()) / name for name in MODEL_FILES]
    assert [file.read_bytes() for file in again] == kept
    assert resumed.images.equals(expected.images) and resumed.record.curve == expected.record.curve


def test_micro_batches_do_not_change_the_training(store: Store, scenes: Manifest, tmp_path: Path) -> None:
    """The places with a box are counted over the whole batch, though micro-batches have different numbers of them."""
    weights = []
    for parts in (1, 4):
        other = open_store(str(tmp_path / str(parts)))
        given = attempt(
            other, ingest_here(other, SCENES), gradient_accumulation_steps=parts, dtype="float32", optimizer=SGD
        )
        first_refit(given)
        weights.append(load_detector(other.local(Layout.files("detect", "k", 1), ()))[0].state_dict())
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize(("policy", "jitter"), [("flip", 0.0), ("flip", 0.5), ("squash_crop_flip", 0.0)])
def test_tokens_of_a_frozen_backbone_are_those_of_its_images(
    policy: str, jitter: float, store: Store, scenes: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept or computed each time, the fit is the same; and the ViT is as it was."""
    backbone = store.local("", ()) / "backbone"
    save_backbone(backbone, ModelSize.model_validate(SIZE), 32, channels=3)
    fields = {"model": None, "backbone": "b", "freeze": "backbone", "augment": policy, "dtype": "float32"}
    fields |= {"optimizer": SGD, "color_jitter": jitter}
    found = []
    for number, limit in enumerate((detecting.MEMORY_BYTES, 0), start=1):
        monkeypatch.setattr(detecting, "MEMORY_BYTES", limit)
        given = attempt(store, scenes, number, **fields)
        monkeypatch.setattr(type(given), "input", lambda *_: backbone)
        task = at_point(make_task(given.config, given.dataset(), backbone), 0, {"learning_rate": 3e-3}, given.dataset())
        pools, _ = finetune.labelled(given.config, given.dataset())
        assert fits.refit(given, task, pools[0], 0) is not None
        found.append(load_detector(store.local(Layout.files("detect", "k", number), ()))[0])
    for (name, one), other in zip(found[0].named_parameters(), found[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3, msg=name)
    before = load_model(backbone)[0].state_dict()
    assert all(torch.equal(before[name], tensor) for name, tensor in found[0].model.state_dict().items())


def test_the_rows_have_cocos_ap_of_the_stored_detections(store: Store, scenes: Manifest) -> None:
    """As faster-coco-eval computes it from detections.parquet alone; and what the report makes of them."""
    task, dataset, done = first_refit(attempt(store, scenes, steps=60))
    rows, predictions, files = detections.tables(task, dataset, [done, done], "dev", {}, NONE)
    assert not predictions
    parts = files[FILE]
    by_metric = {(row["method"], row["draw"], row["metric"]): row["value"] for row in rows}
    assert by_metric[MEDIAN_BOX, 0, "AP"] < 0.05 < by_metric["ViT, from scratch", 1, "AP50"]
    for method, part in (("ViT, from scratch", parts[0]), (MEDIAN_BOX, parts[2])):
        assert part.schema == DETECTIONS
        expected = coco_ap(part.to_pylist(), len(task.objects))
        for metric, value in zip(("AP", "AP50", "AP75"), expected, strict=True):
            assert by_metric[method, 0, metric] == pytest.approx(value, abs=1e-6), metric
    table = pa.concat_tables(parts)
    for name in ("stage", "artifact"):
        table = table.append_column(name, pa.repeat(name, len(table)))
    found = reported.by_task(entries.entries(table))
    best, other = reported.lines(found)
    assert (best["method"], best["draws"], other["method"]) == ("ViT, from scratch", 2, MEDIAN_BOX)
    assert best["low"] < best["value"] < best["high"] and best["behind"] is None
    assert other["behind"] == pytest.approx(best["value"] - other["value"]) and other["behind_low"] < other["behind"]
    assert best["value"] == pytest.approx(by_metric["ViT, from scratch", 0, "AP"])
    (judged,) = verdicts(found["Scenes"])
    assert (judged.reference.method, judged.draws) == (MEDIAN_BOX, 2)
    said = sentence(judged, None)
    assert said.startswith("Scenes, all labels: ViT, from scratch (detection) reaches")
    assert "% AP, the median box (detection)" in said
    assert len(reported.by_task(entries.entries(pa.concat_tables([table, table.slice(24)])))["Scenes"]) == 2


def test_a_promotion_scores_detectors_as_their_stage_does(store: Store, scenes: Manifest) -> None:
    task, dataset, done = first_refit(attempt(store, scenes, steps=60))
    trained = load_detector(store.local(Layout.files("detect", "k", 1), ()))[0]
    models = {}
    for name, detector in (("trained", trained), ("new", detecting.network(task, 5))):
        with committed(store, "detect", name, kind="detector", stage=name) as folder:
            save_detector(folder, detector, detecting.detector_contract(task))
        models[name] = read_manifest(store, "detect", name)
    fields = {"job": "promote", "data": "scenes", "candidate": "found", "against": "@boxes", "floor": 0.9}
    config, results = Promote.model_validate(fields | {"max_loss": 0.001}), []
    for number, inputs in enumerate(({}, {"against": models["new"]}), start=1):
        given = make_context(store, config, data=scenes, candidate=models["trained"], **inputs)
        results.append(promote(replace(given, attempt=given.attempt.model_copy(update={"number": number}))))
    rows, _, files = detections.tables(task, dataset, [done], "dev", {}, NONE)
    (expected,) = [row["value"] for row in rows if (row["metric"], row["selected_on"]) == ("AP", "dev")]
    alone, beside = (result.metrics for result in results)
    assert alone["AP"] == pytest.approx(expected, abs=1e-6) and alone["verdict"] == "below the floor"
    stored = pq.read_table(store.local(Layout.files("promote", "k", 2), ()) / FILE)
    assert {*stored["method"].to_pylist()} == {"candidate", "@boxes"}
    for one, other in zip(stored.to_pylist(), files[FILE][0].to_pylist(), strict=False):
        assert (one["sample_id"], one["boxes"]) == (other["sample_id"], other["boxes"])
        assert [found["label"] for found in one["found"]] == [found["label"] for found in other["found"]]
    assert beside["difference"] == pytest.approx(expected, abs=0.01), "a new detector finds next to nothing"
    assert "points of AP (95% CI" in str(beside["reason"])


def test_planted_faults_of_annotations_are_in_doubt(store: Store) -> None:
    """A detector that finds what is there doubts a missing, a shifted and a wrongly named box, and no other."""
    dataset = attempt(store, ingest_here(store, SCENES | {"test_images": 40})).dataset()
    ids, boxes = dataset.sample_ids("test"), [[box._asdict() for box in some] for some in dataset.boxes("test")]
    found = [
        [{key: box[key] for key in ("x1", "y1", "x2", "y2", "label")} | {"score": 0.9} for box in some]
        for some in boxes
    ]
    of = [number for number, some in enumerate(boxes) if len(some) == 1][:3]
    wide = boxes[of[1]][0]
    width = wide["x2"] - wide["x1"]
    boxes[of[0]] = []
    boxes[of[1]] = [wide | {"x1": wide["x1"] + 0.4 * width, "x2": wide["x2"] + 0.4 * width}]
    boxes[of[2]] = [boxes[of[2]][0] | {"label": (boxes[of[2]][0]["label"] + 1) % 8}]
    about = {"artifact": "a", "stage": "s", "task": "t", "protocol": "p", "method": "m", "draw": 0}
    rows = [about | {"sample_id": i, "boxes": b, "found": f} for i, b, f in zip(ids, boxes, found, strict=True)]
    table = pa.Table.from_pylist(
        rows, pa.schema([pa.field(n, pa.string()) for n in ("artifact", "stage")] + [*DETECTIONS])
    )
    lines = reported.doubted(reported.by_task(entries.entries(table)), {"a": dataset})
    assert {line["sample_id"]: line["doubt"] for line in lines} == dict(
        zip([ids[number] for number in of], ["missing box", "wrong place", "wrong class"], strict=True)
    )


def coco_ap(images: list[dict[str, Any]], classes: int) -> list[float]:
    """AP, AP50 and AP75 of faster-coco-eval."""

    def annotation(number: int, box: dict[str, Any]) -> dict[str, Any]:
        width, height = box["x2"] - box["x1"], box["y2"] - box["y1"]
        place = {"image_id": number, "category_id": box["label"], "bbox": [box["x1"], box["y1"], width, height]}
        return place | {"area": width * height, "iscrowd": int(box.get("ignored", False))}

    given = [annotation(number, box) for number, image in enumerate(images) for box in image["boxes"]]
    truth = COCO(
        {
            "images": [{"id": number, "width": 32, "height": 32} for number in range(len(images))],
            "categories": [{"id": number, "name": str(number)} for number in range(classes)],
            "annotations": [each | {"id": number} for number, each in enumerate(given, 1)],
        }
    )
    results = [
        annotation(number, box) | {"score": box["score"]}
        for number, image in enumerate(images)
        for box in image["found"]
    ]
    evaluation = COCOeval_faster(truth, truth.loadRes(results), "bbox", print_function=lambda *_: None)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return [float(value) for value in evaluation.stats[:3]]


def test_a_detector_is_what_was_saved(store: Store, scenes: Manifest, tmp_path: Path) -> None:
    given = attempt(store, scenes)
    task = make_task(given.config, given.dataset(), None)
    made = detecting.network(task, 5).eval()
    save_detector(tmp_path, made, detecting.detector_contract(task))
    loaded, contract = load_detector(tmp_path)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for one, other in zip(made(pixels), loaded(pixels), strict=True):
        assert torch.equal(one, other)
    assert contract.class_names == given.dataset().info.class_names and contract.scales == (2, 1)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"channels": 32', '"channels": 64', 1))
    with pytest.raises(UserError, match="wrong shapes"):
        load_detector(tmp_path)
    config.write_text(config.read_text().replace('"convs": 1', '"convs": 1000000000', 1))
    with pytest.raises(UserError, match="convs"):
        load_detector(tmp_path)
    config.write_text(config.read_text().replace('"convs": 1000000000', '"convs": 1', 1))
    config.write_text(config.read_text().replace('"channels": 64', '"channels": 33', 1))
    with pytest.raises(UserError, match="33 is not a multiple of 32"):
        load_detector(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mixup": 0.2}, "mixup: detect has no such setting"),
        ({"augment": "shift"}, "augment shift: detect needs a policy that crops or flips"),
        ({"scales": [1, 2]}, "give neighbours among 4, 2, 1, 0.5, the largest first"),
        ({"optimizer": {"base_width": 32}}, "optimizer.base_width: detect has no such setting"),
    ],
)
def test_settings_that_do_not_fit_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configuration(**fields)


def test_what_cannot_be_a_backbone_is_the_users_mistake(store: Store, scenes: Manifest) -> None:
    dataset = attempt(store, scenes).dataset()
    task = make_task(configuration(scales=[1, 0.5], resolution=24), dataset, None)
    with pytest.raises(UserError, match="3 x 3 patches cannot be halved"):
        detecting.network(task, 0)
    pooled = configuration(model=SIZE | {"pooling": "map"})
    assert fit.parameters(make_task(pooled, dataset, None))[1] < fit.parameters(make_task(pooled, dataset, None))[0]
    without = Dataset(dataset.folder, dataset.info.model_copy(update={"has_boxes": False}), dataset._shards)
    with pytest.raises(UserError, match="dataset Scenes has no boxes; give its source `boxes`"):
        Images(without, without.index("test")).dataset.boxes("test")
