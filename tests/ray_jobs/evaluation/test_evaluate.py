"""Evaluation in this process, without Ray: what is scored, on which labels, against which independent computation."""

import json
import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from pipelines import store as st
from pipelines.files.sources import source_files
from pipelines.spec import Baselines, DigitsSource, Evaluate, Labels, NamedCheckpoint, ResNetSize
from pipelines.store import Manifest, Store, open_store
from ray_jobs import baselines, evaluate
from ray_jobs.data import shards
from ray_jobs.data.images import sample_id
from ray_jobs.evaluation import features
from ray_jobs.evaluation.features import features_of, support_of
from ray_jobs.evaluation.supports import draw_labels
from ray_jobs.sources import catalog
from ray_jobs.training.contract import model_contract
from tests.support import datasets
from tests.support.checkpoints import SIZE, model_at, put_pretraining, put_untrained
from tests.support.records import flip, make_context, make_manifest
from tests.support.s3 import Server, used
from vit_model.blocks import resize_position_embedding
from vit_model.errors import UserError
from vit_model.model import ViT
from vit_model.weights import load_model, save_model

LABELS = Labels(per_class=6, draws=3, folds=3, seed=5)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return open_store(str(tmp_path_factory.mktemp("store")))


@pytest.fixture(scope="module")
def digits(store: Store) -> Manifest:
    """The real digits, written as ingest writes them."""
    source = DigitsSource(kind="digits")
    files = {name: str(path) for name, path in source_files(source).items()}
    listing = catalog.listing(source, files)
    splits = {split: [] for split in shards.SPLITS}
    for entry, pixels in zip(listing.entries.to_pylist(), catalog.images(source, files, listing.entries), strict=True):
        identity = sample_id(sha256(pixels.tobytes()).digest(), entry["key"])
        splits[entry["split"]].append(datasets.raw(identity, pixels, entry["label"]))
    with store.staging(st.Layout.files("ingest", "k", 1)) as staging:
        datasets.put(staging.path, "digits", listing.class_names, listing.image, splits)
    return make_manifest("ingest", files=staging.files)


@pytest.fixture(scope="module")
def model(store: Store, digits: Manifest) -> Manifest:
    return put_untrained(store, digits)


def test_rows_say_of_which_family_a_model_is(store: Store, digits: Manifest) -> None:
    resnet = put_untrained(store, digits, "resnet", size=ResNetSize(units=(1,)))
    config = Evaluate(job="evaluate", data="d", backbone="m", shots=(1,), draws=1)
    result = evaluate.evaluate(make_context(store, config, data=digits, backbone=resnet))
    named = {name for name in result.metrics if " @ " in name and not name.startswith("pixels")}
    assert named == {
        "ResNet, trained on these images @ 1",
        "ResNet, untrained @ 1",
        "most frequent class @ 1",
    }


def test_what_lies_at_the_sides_is_seen_where_the_whole_image_is(store: Store) -> None:
    """Wide images whose classes differ at their ends alone: the middle square says nothing, the squashed image all."""
    rng, samples = np.random.default_rng(0), {split: [] for split in shards.SPLITS}
    for number in range(120):
        pixels = rng.integers(100, 156, (8, 32, 1), np.uint8)
        pixels[:, :8] = pixels[:, -8:] = 255 * (number % 2)
        split = ("train", "test")[number // 60]
        samples[split].append(datasets.raw(f"{number:032d}", pixels, number % 2))
    with store.staging(st.Layout.files("ingest", "wide", 1)) as staging:
        datasets.put(staging.path, "wide", ("a", "b"), shards.ImageSize(height=8, width=32, channels=1), samples)
    wide = make_manifest("ingest", key="wide", files=staging.files)
    backbone = put_untrained(store, wide, "wide")
    assert load_model(st.local_files(store, backbone))[1].preprocessing.crop == "center"

    def pixels_score(**given: Any) -> float:
        config = Evaluate(job="evaluate", data="d", backbone="m", shots=(10,), draws=2, **given)
        result = evaluate.evaluate(make_context(store, config, data=wide, backbone=backbone))
        return float(result.metrics["pixels @ 10"])

    assert pixels_score() < 0.8
    assert pixels_score(eval_crop={"crop": "squash"}) == 1.0


def test_there_is_a_row_for_each_method_draw_and_number_of_labels(
    store: Store, digits: Manifest, model: Manifest
) -> None:
    config = Evaluate(job="evaluate", data="d", backbone="m", shots=(1, 5), draws=2, seed=7)
    result = evaluate.evaluate(make_context(store, config, data=digits, backbone=model))
    folder = store.local(st.Layout.files("evaluate", "k", 1), ())
    found = pq.read_table(folder / "rows.parquet").to_pylist()
    assert len(found) == 5 * 2 * 2
    assert {row["method"] for row in found} == {
        "most frequent class",
        "ViT, trained on these images",
        "ViT, untrained",
        "pixels",
        "pixels, standardised",
    }
    assert result.metrics["pixels @ 5"] == np.mean(
        [row["value"] for row in found if row["method"] == "pixels" and row["labels_per_class"] == 5]
    )


def test_retrieval_adds_rows_of_its_own(store: Store, digits: Manifest, model: Manifest) -> None:
    """One per kind of features and initialisation, none for standardised pixels."""
    config = Evaluate(job="evaluate", data="d", backbone="m", shots=(1,), draws=1, retrieval=True)
    result = evaluate.evaluate(make_context(store, config, data=digits, backbone=model))
    folder = store.local(st.Layout.files("evaluate", "k", 1), ())
    found = [row for row in pq.read_table(folder / "rows.parquet").to_pylist() if row["metric"] == "mAP"]
    untrained = [("ViT, untrained", draw) for draw in range(3)]
    assert [(row["method"], row["draw"]) for row in found] == [
        ("ViT, trained on these images", 0),
        *untrained,
        ("pixels", 0),
    ]
    assert {(row["protocol"], row["num_images"], row["labels_per_class"]) for row in found} == {
        ("retrieval", 539, None)
    }

    assert result.metrics["pixels, mAP @ all, retrieval"] == found[-1]["value"]
    images = pq.read_table(folder / "predictions.parquet")
    assert set(images["protocol"].to_pylist()) == {"few-shot linear"}


@pytest.mark.parametrize("labels", [LABELS, Labels()])
def test_baselines_choose_without_test(store: Store, digits: Manifest, labels: Labels, monkeypatch: Any) -> None:
    """With all labels of test exchanged, the settings stay the same."""
    config = Baselines(job="baselines", data="d", methods=("logistic regression",), labels=labels)
    before, predictions = baselines.run_method(make_context(store, config, data=digits), "logistic regression")
    honest = shards.Dataset.labels

    def exchanged(self: shards.Dataset, split: shards.Split) -> np.ndarray:
        found = honest(self, split)
        return (found + 1) % 10 if split == "test" else found

    monkeypatch.setattr(shards.Dataset, "labels", exchanged)
    after, _ = baselines.run_method(make_context(store, config, data=digits), "logistic regression")
    assert [row["settings"] for row in before] == [row["settings"] for row in after]
    assert all(one["value"] > 0.8 > 0.2 > two["value"] for one, two in zip(before, after, strict=True))
    assert sum(map(len, predictions)) == (labels.draws if labels.per_class else 1) * 539


def test_features_are_the_backbones(store: Store, digits: Manifest, model: Manifest, tmp_path: Path) -> None:
    """Trained and untrained rows equal forward passes written out, on exactly the images of the supports."""
    config = Evaluate(job="evaluate", data="d", backbone="m", shots=(2,), draws=1, seed=4)
    dataset = shards.open_dataset(st.local_files(store, digits))
    support = support_of(dataset, config)
    made = make_context(store, config, data=digits, backbone=model)
    found = {
        kind.method: kind.pairs for kind in features_of(made, dataset, support, "trained", evaluate.here, tmp_path)
    }
    network, contract = load_model(st.local_files(store, model))
    untrained = []
    for seed in (4, 5, 6):
        untrained.append(ViT(contract.architecture).eval())
        untrained[-1].initialise(seed)
    chosen = draw_labels(dataset.labels("train"), 2, seed=4, draw=0)
    for name, networks in (("ViT, trained", [network]), ("ViT, untrained", untrained)):
        for net, pair in zip(networks, found[name], strict=True):
            for split, own in zip(("train", "test"), pair, strict=True):
                images = dataset.images(split, contract.preprocessing)
                scaled = torch.from_numpy(images).permute(0, 3, 1, 2) / 255
                with torch.inference_mode():
                    expected = net.forward_features((scaled - 0.5) / 0.5)[1].numpy()
                rows_used = chosen if split == "train" else np.arange(len(expected))
                np.testing.assert_allclose(own[rows_used], expected[rows_used], atol=1e-5)


def test_features_at_another_resolution_have_the_trained_weights_and_resized_positions(
    store: Store, digits: Manifest, model: Manifest, tmp_path: Path
) -> None:
    config = Evaluate(job="evaluate", data="d", backbone="m", shots=(), linear_probe=True, draws=1, resolution=16)
    dataset = shards.open_dataset(st.local_files(store, digits))
    made = make_context(store, config, data=digits, backbone=model)
    support = support_of(dataset, config)
    [(_, found)] = next(features_of(made, dataset, support, "trained", evaluate.here, tmp_path)).pairs
    network, contract = load_model(st.local_files(store, model))
    larger = ViT(contract.architecture.model_copy(update={"image_size": 16})).eval()
    weights = network.state_dict()
    weights["pos_embed"] = resize_position_embedding(
        weights["pos_embed"], contract.architecture.grid, larger.config.grid, 1
    )
    larger.load_state_dict(weights)
    pixels = contract.preprocessing.model_copy(update={"resolution": 16})
    scaled = torch.from_numpy(dataset.images("test", pixels)).permute(0, 3, 1, 2) / 255
    with torch.inference_mode():
        expected = larger.forward_features((scaled - 0.5) / 0.5)[1].numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)
    made = make_context(store, config.model_copy(update={"resolution": 15}), data=digits, backbone=model)
    with pytest.raises(UserError, match=r"resolution 15: .* is not a multiple of patch_size"):
        next(features_of(made, dataset, support, "trained", evaluate.here, tmp_path))


def test_only_images_that_no_evaluation_has_seen_are_computed(
    store: Store, digits: Manifest, model: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other shots compute the features of other support images alone; other crops compute all; the rows stay."""
    computed: list[int] = []

    def counting(function: Any, tasks: list[Any]) -> list[Any]:
        if function is features.embed_rows:
            computed.append(sum(len(task[-1]) for task in tasks))
        return evaluate.here(function, tasks)

    def run(key: str, data: Manifest = digits, **fields: Any) -> tuple[int, list[dict[str, Any]]]:
        config = Evaluate(job="evaluate", data="d", backbone="m", **{"shots": (2,), "draws": 1} | fields)
        context = make_context(store, config, data=data, backbone=model)
        context = replace(context, attempt=context.attempt.model_copy(update={"key": key}))
        result = evaluate.evaluate(context, counting)
        st.commit(store, make_manifest("evaluate", key=key, files=result.files))
        folder = store.local(st.Layout.files("evaluate", key, 1), ())
        return computed[-1], pq.read_table(folder / "rows.parquet").to_pylist()

    assert run("first")[0] == 20 + 539
    assert run("again")[0] == 0
    more, found = run("more", shots=(3,))
    assert more == 10, "1-shot images are among the 2-shot images and so on"
    assert run("cropped", eval_crop={"crop": "center", "crop_fraction": 0.5})[0] == 20 + 539
    monkeypatch.setattr(features, "_earlier", lambda *_: [])
    everything, alone = run("alone", shots=(3,))
    assert (everything, alone) == (30 + 539, found)


def test_features_that_were_damaged_are_computed_again(
    store: Store, digits: Manifest, model: Manifest, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Evaluate(job="evaluate", data="d", backbone="m", shots=(1,), draws=1, seed=11)
    context = make_context(store, config, data=digits, backbone=model)
    context = replace(context, attempt=context.attempt.model_copy(update={"key": "damaged"}))
    before = evaluate.evaluate(context)
    st.commit(store, make_manifest("evaluate", key="damaged", files=before.files))
    for file in (Path(store.uri) / st.Layout.files("evaluate", "damaged", 1) / "features").iterdir():
        flip(file)
    capsys.readouterr()
    after = evaluate.evaluate(make_context(store, config, data=digits, backbone=model))
    assert "are recomputed" in capsys.readouterr().out
    assert after.content_digest == before.content_digest


def test_an_evaluation_of_a_checkpoint_is_that_of_a_model_with_its_weights(store: Store, digits: Manifest) -> None:
    contract = model_contract(SIZE, 8, shards.open_dataset(st.local_files(store, digits)).info)
    pretrained = put_pretraining(store, contract)
    with store.staging(st.Layout.files("pretrain", "alone", 1)) as staging:
        save_model(staging.path, model_at(10, contract), contract)
    alone = make_manifest("pretrain", key="alone", files=staging.files)

    def rows_of(backbone: str | NamedCheckpoint, manifest: Manifest) -> list[dict[str, Any]]:
        config = Evaluate(job="evaluate", data="d", backbone=backbone, shots=(1,), draws=1)
        evaluate.evaluate(make_context(store, config, data=digits, backbone=manifest))
        folder = store.local(st.Layout.files("evaluate", "k", 1), ())
        return pq.read_table(folder / "rows.parquet").to_pylist()

    expected = rows_of("m", alone)
    found = rows_of(NamedCheckpoint(stage="m", checkpoint="step:10"), pretrained)
    assert found != rows_of("m", pretrained)
    settings = [json.loads(row.pop("settings")) for row in found]
    assert {one.pop("checkpoint") for one in settings} == {"step:10"}
    assert settings == [json.loads(row.pop("settings")) for row in expected]
    assert found == expected


def test_from_s3_comes_the_same_and_only_what_is_looked_at(
    store: Store,
    digits: Manifest,
    model: Manifest,
    tmp_path: Path,
    moto: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Evaluate(job="evaluate", data="d", backbone="m", shots=(1,), draws=1, seed=1)
    pixels = Baselines(job="baselines", data="d", methods=("k-NN",), labels=LABELS)
    here = evaluate.evaluate(make_context(store, config, data=digits, backbone=model))
    here_pixels, _ = baselines.run_method(make_context(store, pixels, data=digits), "k-NN")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with used(moto, monkeypatch) as server:
        remote = open_store(f"s3://{server.bucket().name}")
        for manifest in (digits, model):
            with remote.staging(manifest.folder) as staging:
                shutil.copytree(st.local_files(store, manifest), staging.path, dirs_exist_ok=True)
        there = evaluate.evaluate(make_context(remote, config, data=digits, backbone=model))
        there_pixels, _ = baselines.run_method(make_context(remote, pixels, data=digits), "k-NN")
    assert there.content_digest == here.content_digest and there_pixels == here_pixels
    fetched = {path.stat().st_size for path in (tmp_path / "vitflow" / "objects").rglob("*") if path.is_file()}
    shard_sizes = {file.size for file in digits.files if file.path.startswith("shards/")}
    assert fetched and not fetched & shard_sizes
