"""Fine-tuning: what the sweep may see, what it chooses, and (with Ray) the whole stage twice."""

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.metrics import average_precision_score

from pipelines.spec import Finetune, Labels, ResNetSize
from pipelines.store import Layout, decode_lines
from ray_jobs import finetune
from ray_jobs.data import shards
from ray_jobs.data.writing import shard_file
from ray_jobs.evaluation.leakage import COMPARED, Overlap
from ray_jobs.evaluation.supports import Supports
from ray_jobs.process.context import Result
from ray_jobs.training import fit as fit_module
from ray_jobs.training import steps as steps_module
from ray_jobs.training.evaluators import Evaluator, predict, score
from ray_jobs.training.fit import Validation, fit, start_model
from ray_jobs.training.log import LogWriter, Reporting
from ray_jobs.training.task import DIVERGED, Evaluation, Images, Task, make_task
from ray_jobs.tuning.fits import refit
from ray_jobs.tuning.runner import _show_unraisable, choose, last_step
from ray_jobs.tuning.trial import TriedPoint
from tests.support.finetuning import SIZE, configuration, context, put_halves, save_backbone, trial
from tests.support.memory_store import MemoryStore
from tests.support.records import make_attempt
from tests.support.stores import repeated
from vit_model.errors import UserError
from vit_model.weights import load_model

RESNET = ResNetSize(units=(1, 1), width_factor=1)
PARTS = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")


@pytest.fixture
def dataset(tmp_path) -> Path:
    return put_halves(tmp_path / "dataset")


def prepared(dataset: Path, config: Finetune) -> tuple[Task, list[Images], Supports]:
    opened = shards.open_dataset(dataset)
    task = make_task(config, opened, None)
    return task, *finetune.labelled(config, opened)


def test_vtabs_augmentation_is_that_of_the_task(dataset):
    config, opened = configuration(augment="vtab"), shards.open_dataset(dataset)
    with pytest.raises(UserError, match=r"augment vtab .* halves"):
        make_task(config, opened, None)
    for name, policy in (("DMLab", "flip"), ("sNORB-Azimuth", "squash_crop")):
        opened.info = opened.info.model_copy(update={"name": name})
        assert make_task(config, opened, None).config.augment == policy


def test_with_all_labels_refits_repeat_the_fit_with_other_seeds(tmp_path, dataset):
    config = configuration(labels=Labels(), learning_rates=(1e-2,), refits=3)
    _, pools, _ = prepared(dataset, config)
    assert [len(pool.labels) for pool in pools] == [80, 80, 80]
    with pytest.raises(ValueError, match="refits 3: with labels"):
        configuration(refits=3)


def test_few_labels_are_drawn_from_train_and_folds_part_the_first_draw(dataset):
    (dataset / shard_file(2)).unlink()  # nothing here may open it
    (dataset / shard_file(1)).unlink()
    _, pools, supports = prepared(dataset, configuration())
    assert [np.bincount(pool.labels).tolist() for pool in pools] == [[4, 4], [4, 4]]
    assert set(pools[0].rows["key"].to_pylist()) != set(pools[1].rows["key"].to_pylist())
    assert sorted(np.concatenate([outside for _, outside in supports.folds])) == list(range(8))
    for inside, outside in supports.folds:
        assert sorted([*inside, *outside]) == list(range(8))


def test_an_image_that_several_draws_take_is_compared_once(dataset):
    _, pools, supports = prepared(dataset, configuration(labels=Labels(per_class=20, draws=3, folds=2)))
    drawn = {one for pool in pools for one in pool.rows["sample_id"].to_pylist()}
    found = supports.pool.take(supports.rows)
    assert len(drawn) < sum(len(pool.labels) for pool in pools)
    assert sorted(found["sample_id"].to_pylist()) == sorted(drawn)
    assert {*COMPARED} <= {*found.schema.names}


def test_with_all_labels_dev_chooses_and_is_refitted_on(dataset):
    (dataset / shard_file(2)).unlink()
    opened = shards.open_dataset(dataset)
    _, (pool,), supports = prepared(dataset, configuration(labels=Labels()))
    ((inside, outside),) = supports.folds
    assert (len(pool.labels), len(inside), len(outside), supports.selected_on) == (80, 60, 20, "dev")
    np.testing.assert_array_equal(pool.take(inside).labels, opened.labels("train"))
    np.testing.assert_array_equal(pool.take(outside).labels, opened.labels("dev"))


def tried(accuracies: list[float], losses: list[float], number: int = 0) -> TriedPoint:
    folds = [trial(accuracy, loss, 1) for accuracy, loss in zip(accuracies, losses, strict=True)]
    return TriedPoint(number, {"learning_rate": 1.0 + number}, folds)


def test_the_best_mean_wins_and_the_loss_breaks_ties():
    points = [
        tried([1.0, 0.5], [0.1, 0.1], 0),
        tried([0.8, 0.8], [0.9, 0.9], 1),
        tried([0.9, 0.7], [0.2, 0.95], 2),
    ]
    assert choose(points).number == 2, "0.575 is less than 0.9, though its worst fold is worse"
    other = [trial(0.0, 0.1, 1, metrics={"macro-F1": 0.9}) for _ in range(2)]
    assert choose([*points, points[0]._replace(folds=other, number=3)]).number == 3, "a named metric ranks"


def test_a_rate_that_diverged_in_fewer_folds_comes_first():
    lost = DIVERGED
    best_but_for_a_fold = tried([1.0, 1.0, 0.0], [0.1, 0.1, lost], 1)
    sound = tried([0.5, 0.5, 0.5], [0.9, 0.9, 0.9], 2)
    worse = tried([1.0, 0.0, 0.0], [0.1, lost, lost], 3)
    never = tried([0.0] * 3, [lost] * 3, 4)
    assert choose([best_but_for_a_fold, sound, worse, never]).number == 2
    assert choose([never, worse, best_but_for_a_fold]).number == 1
    assert choose([never, worse]).number == 3
    with pytest.raises(ValueError, match="diverged with every rate of the sweep"):
        choose([never, never._replace(number=5)])


def test_several_labels_per_image_give_a_mean_average_precision(tmp_path, dataset):
    """ReaL's: scikit-learn's macro average of the stored model's probabilities, also from the ledger."""
    path = dataset / "index.parquet"
    table, rng = pq.read_table(path), np.random.default_rng(0)
    several = [sorted(rng.permutation(2)[: rng.integers(0, 3)].tolist()) for _ in range(len(table))]
    column = pa.array(several, pa.list_(pa.int32()))
    pq.write_table(table.set_column(table.schema.get_field_index("labels"), "labels", column), path)
    config = configuration(labels=Labels(), learning_rates=(1e-2,), steps=3)
    task, pools, _ = prepared(dataset, config)
    task = task._replace(point={"learning_rate": 1e-2})
    given = context(tmp_path / "store", dataset, config)
    first = refit(given, task, pools[0], 0)
    again = refit(given, task, pools[0], 0)
    assert again.record.mean_ap == first.record.mean_ap
    opened = shards.open_dataset(dataset)
    test = Images(opened, opened.index("test"))
    folder = given.open_store().local(Layout.files("finetune", given.attempt.key, 1), ())
    probabilities = predict(*load_model(folder), test).softmax(dim=1).numpy()
    truth = np.array([[label in each for label in (0, 1)] for each in test.rows["labels"].to_pylist()])
    kept = truth.any(axis=1)
    expected = average_precision_score(truth[kept], probabilities[kept], average="macro")
    overlap = Overlap(np.zeros(30, bool), 0, 0, 0)
    found, *_ = finetune.tables(task, opened, [again], "dev", overlap)
    assert [(row["task"], row["metric"]) for row in found] == [
        ("halves", "accuracy"),
        ("halves (ReaL)", "accuracy"),
        ("halves (ReaL)", "mAP"),
    ]
    assert found[2]["value"] == pytest.approx(expected, abs=1e-6) and 0.3 < expected < 1
    assert found[2]["num_images"] == found[1]["num_images"] == kept.sum() < 30
    seen = overlap._replace(seen=np.arange(30) < 5)
    assert {row["metric"] for row in finetune.tables(task, opened, [again], "dev", seen)[0]} == {"accuracy"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_fit_learns_and_repeats_itself(dataset, dtype):
    config = configuration(dtype=dtype, labels=Labels(), steps=60, augment="shift")
    task, (pool,), supports = prepared(dataset, config)
    ((inside, outside),) = supports.folds
    writer = LogWriter(MemoryStore(), make_attempt("finetune"), "trial-0-0")  # which changes nothing
    first, curve, _ = fit(task, pool.take(inside), 1e-2, seed=3)
    held_out = pool.take(outside)
    validation = Validation(Evaluator(held_out, task.contract.preprocessing))
    second, *_ = fit(task, pool.take(inside), 1e-2, seed=3, reporting=Reporting(writer), validation=validation)
    assert score(predict(first, task.contract, held_out), held_out.labels).accuracy > 0.9
    assert curve[-1]["loss"] < curve[0]["loss"]
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)
    lines = writer.unsaved()
    assert [(line.step, line.loss) for line in lines if line.step % 3 == 0 and line.step % 12] == [
        (point["step"], point["loss"]) for point in curve if point["step"] % 12
    ]
    evaluated = [line for line in lines if line.dev_loss is not None]
    assert [line.step for line in evaluated] == [12, 24, 36, 48]
    assert evaluated[0].dev_loss > evaluated[-1].dev_loss


def test_micro_batches_of_a_fit_are_parts_of_the_batch(dataset):
    """Also with weights of the classes, which are uneven over the parts. AdamW scales rounding differences up."""
    optimizer = {"name": "sgd", "clip_norm": None}
    fields = {"dtype": "float32", "class_weights": {"left": 3.0}, "optimizer": optimizer}
    fitted = []
    for count in (1, 4):
        task, (pool, _), _ = prepared(dataset, configuration(**fields, gradient_accumulation_steps=count))
        fitted.append(fit(task, pool, 1e-2, seed=3)[0])
    for one, other in zip(*(model.parameters() for model in fitted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_weight_for_a_class_without_images_is_the_users_mistake(dataset):
    task, *_ = prepared(dataset, configuration(labels=Labels()))
    opened = shards.open_dataset(dataset)
    opened.info = opened.info.model_copy(update={"class_names": (*task.contract.class_names, "absent")})
    config = configuration(labels=Labels(), class_weights={"absent": 2.0})
    with pytest.raises(UserError, match="class_weights: class 'absent' has no labelled image"):
        finetune.labelled(config, opened)


def test_a_refit_repeats_the_steps_of_its_trial_until_it_was_best(dataset):
    """On the same images it is the model that the trial's best evaluation saw, of the same schedule."""
    early = {"evaluations": 10, "patience": 2}
    config = configuration(labels=Labels(), steps=40, optimizer={"ema": 0.5}, early_stopping=early)
    task, (pool,), supports = prepared(dataset, config)
    ((inside, outside),) = supports.folds
    data, held_out = pool.take(inside), pool.take(outside)
    stopping = fit_module.Stopping(40, 10, patience=2)
    images = Evaluator(held_out, task.contract.preprocessing)
    fit(task, data, 3e-2, seed=0, validation=Validation(images, stopping))
    accuracies = {each.step: each.accuracy for each in stopping.evaluations}
    best, last = stopping.best, max(accuracies)
    assert best.accuracy == max(accuracies.values()) > 0.5
    assert last == best.step + 2 * 4 < 40, "it ended two evaluations after its best"
    again, curve, _ = fit(task._replace(last_step=best.step), data, 3e-2, seed=0)
    accuracy, loss, *_ = score(predict(again, task.contract, held_out), held_out.labels)
    assert (accuracy, loss) == (best.accuracy, best.loss)
    assert curve[-1]["step"] == best.step


@pytest.mark.parametrize(
    ("accuracies", "losses", "best", "over"),
    [
        ([0.5, 0.7, 0.6, 0.6], [1, 1, 1, 1], 4, True),
        ([0.5, 0.7, 0.6], [1, 1, 1], 4, False),
        ([0.7, 0.7, 0.7], [1, 0.9, 1], 4, False),  # a lower loss is better
        ([0.7, 0.7, 0.7], [1, 1, 1], 2, True),  # an equal evaluation is not
        ([0.7, None, None], [1, 1, 1], 2, True),
        ([None, 0.0, 0.5], [1, 1, 1], 6, False),
    ],
)
def test_a_trial_ends_after_so_many_evaluations_that_were_not_its_best(accuracies, losses, best, over):
    stopping = fit_module.Stopping(20, 10, patience=2)
    assert not stopping.is_over
    for number, (accuracy, loss) in enumerate(zip(accuracies, losses, strict=True)):
        assert not stopping.is_over
        stopping.add(2 * number + 2, None if accuracy is None else Evaluation(2 * number + 2, accuracy, loss))
    assert stopping.best.step == best
    assert stopping.is_over == over


def test_a_trial_whose_evaluations_all_diverged_has_no_result():
    stopping = fit_module.Stopping(20, 20, patience=5)
    stopping.add(1, None)
    with pytest.raises(ValueError, match="loss is inf after training"):
        _ = stopping.best


def test_refits_end_at_the_median_of_the_folds_best_steps():
    trials = [trial(0.5, loss, step) for step, loss in ((8, 1.0), (6, 1.0), (20, DIVERGED), (4, 1.0))]
    assert last_step(trials) == 6
    trials[2] = trial(0.5, 1.0, 20)
    assert last_step(trials) == 6, "an evaluation that there was, the lower one of two"


def test_stochastic_depth_of_a_fit_is_drawn_per_sample_and_not_from_torchs_generator(dataset, monkeypatch):
    weights = []
    for rate, seed_of_step in ((0.5, 0), (0.5, 1), (0.0, 1)):
        monkeypatch.setattr(steps_module, "dropout_seed", lambda *_, seed=seed_of_step: seed)
        size = SIZE.model_copy(update={"depth": 2, "stochastic_depth": rate})
        task, pools, _ = prepared(dataset, configuration(model=size, steps=3))
        model, *_ = fit(task, pools[0], 1e-2, seed=0)
        weights.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


@pytest.mark.slow
def test_a_model_whose_last_step_diverged_has_no_score(dataset):
    task, pools, _ = prepared(dataset, configuration(steps=1))
    model, *_ = fit(task, pools[0], 1e30, seed=0)
    with pytest.raises(UserError, match=r"loss is nan after training: lower learning_rate"):
        score(predict(model, task.contract, pools[0]), pools[0].labels)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"resolution": 9}, "^fine-tuning b: image_size 9 is not a multiple"),
        ({"freeze": 2}, "freeze 2: the backbone has 1 blocks"),
        ({"lora": {"rank": 17}}, "lora.rank 17: the backbone's matrices have 16 rows"),
        ({"class_weights": {"lefft": 2.0}}, "class_weights: .* no class 'lefft'; did you mean 'left'"),
        ({"lora": {}, "of": RESNET}, "lora needs .* a ViT, .* a ResNet: use freeze: backbone or"),
        ({"stochastic_depth": 0.1, "of": RESNET}, "stochastic_depth needs .* a ViT, .* a ResNet"),
    ],
)
def test_settings_that_do_not_fit_the_backbone_or_the_classes_are_the_users_mistake(dataset, tmp_path, fields, message):
    fields = {"backbone": "b", "model": None, "resolution": None, **fields}
    save_backbone(tmp_path, *filter(None, [fields.pop("of", None)]))
    config = configuration(**fields)
    with pytest.raises(UserError, match=message):
        make_task(config, shards.open_dataset(dataset), tmp_path)


def test_biases_of_a_resnet_can_be_trained_alone(dataset, tmp_path):
    save_backbone(tmp_path, RESNET)
    biases = configuration(backbone="resnet", model=None, resolution=None, freeze="all_but_biases")
    assert fit_module.parameters(make_task(biases, shards.open_dataset(dataset), tmp_path))[1] > 0


def test_stochastic_depth_takes_the_place_of_the_backbones(dataset, tmp_path):
    save_backbone(tmp_path)
    given = configuration(
        backbone="vit", model=None, resolution=None, stochastic_depth=0.1, activation_checkpointing=True
    )
    task = make_task(given, shards.open_dataset(dataset), tmp_path)
    assert task.contract.architecture.stochastic_depth == 0.1
    model, *_ = fit_module.start(task, 1e-2, seed=0)
    assert model.activation_checkpointing


def test_uneven_classes_are_balanced_by_weights_or_by_sampling(dataset):
    """Both give the rare class the same part in the loss, which the images alone do not."""
    opened = shards.open_dataset(dataset)
    train = Images(opened, opened.index("train"))
    rare = np.concatenate([np.flatnonzero(train.labels == 0)[:2], np.flatnonzero(train.labels == 1)[:18]])
    uneven = train.take(rare)
    weighted = make_task(configuration(class_weights="balanced"), opened, None)
    assert fit_module.class_weights(weighted, uneven).tolist() == [20 / (2 * 2), pytest.approx(20 / (2 * 18))]
    named = make_task(configuration(class_weights={"right": 3.0}), opened, None)
    assert fit_module.class_weights(named, uneven).tolist() == [1.0, 3.0]

    seen = []

    class Recorded(fit_module.Loader):
        def __next__(self):
            batch = super().__next__()
            seen.append(batch.labels)
            return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit_module, "Loader", Recorded)
        fit(make_task(configuration(sampling="balanced"), opened, None), uneven, 1e-3, seed=0)
    assert np.bincount(np.concatenate(seen)).tolist() == [80, 80]


@pytest.mark.parametrize(
    ("fields", "trained"),
    [
        (
            {"freeze": "all_but_biases"},
            {f"blocks.0.{part}.bias" for part in PARTS} | {"patch_embed.proj.bias", "norm.bias"},
        ),
        (
            {"lora": {"rank": 2, "targets": ["key", "proj"]}},
            {f"blocks.0.attn.lora.{kind}.weight" for kind in ("key.down", "key.up", "proj.down", "proj.up")},
        ),
        ({"freeze": "backbone"}, set()),
    ],
    ids=["biases", "lora", "head"],
)
def test_only_what_is_trained_moves_and_the_model_is_an_ordinary_one(dataset, tmp_path, monkeypatch, fields, trained):
    save_backbone(tmp_path)
    opened = shards.open_dataset(dataset)
    config = configuration(backbone="vit", model=None, resolution=None, dtype="float32", **fields)
    task = make_task(config, opened, tmp_path)
    images = Images(opened, opened.index("train"))
    started = dict(start_model(task, seed=0).named_parameters())
    ordinary, _, _ = fit(task, images, 1e-2, seed=0)
    with monkeypatch.context() as patch:
        patch.setattr(fit_module.lora, "merge", lambda model: None)
        model, _, _ = fit(task, images, 1e-2, seed=0)
    expected = trained | {"head.weight", "head.bias"}
    changed = {
        name
        for name, weight in model.named_parameters()
        if name not in started or not torch.equal(weight, started[name])
    }
    assert changed == expected
    assert fit_module.parameters(task)[1] == sum(
        weight.numel() for name, weight in model.named_parameters() if name in expected
    )
    assert ordinary.state_dict().keys() == started.keys()
    torch.testing.assert_close(predict(ordinary, task.contract, images), predict(model, task.contract, images))


@pytest.mark.ray
def test_the_whole_stage_twice(dataset, tmp_path, local_ray):
    results: list[Result] = []
    for name, every in {"one": {"minutes": 10}, "two": {"steps": 3}}.items():
        config = configuration(checkpoint_every=every)
        results.append(finetune.main(context(tmp_path / name, dataset, config)))
        assert not [*(tmp_path / name / "artifacts").rglob("checkpoints")]
    assert repeated(results[0].files) == repeated(results[1].files)
    assert results[0].content_digest == results[1].content_digest
    folder = tmp_path / "one" / "artifacts/finetune/k/attempts/1/files"
    assert {path.name for path in folder.iterdir()} == {
        "model.safetensors",
        "config.json",
        "rows.parquet",
        "predictions.parquet",
        "sweep.json",
        "curves.json",
        "log.jsonl",
        "cost.json",
    }
    lines = decode_lines((folder / "log.jsonl").read_bytes(), "log.jsonl")
    fits = {"trial-0-0", "trial-0-1", "trial-1-0", "trial-1-1", "refit-1-0", "refit-1-1"}
    for name in fits:
        own = [line for line in lines if line.fit == name]
        assert [line.step for line in own] == [*range(1, 21)]
        measured = [line.step for line in own if line.dev_accuracy is not None]
        assert measured == ([4, 8, 12, 16, 20] if name.startswith("trial") else [])
    assert {line.fit for line in lines} == fits
    last = {line.fit: line.dev_accuracy for line in lines if line.step == 20}
    assert not (folder.parent / ".ray-tune").exists()
    sweep = json.loads((folder / "sweep.json").read_text())
    assert [trial["learning_rate"] for trial in sweep["trials"]] == [1e-4, 1e-2]
    assert sweep["chosen"] == 1e-2
    assert sweep["trials"][1]["accuracies"] == [last["trial-1-0"], last["trial-1-1"]]
    numbers = pq.read_table(folder / "rows.parquet").to_pylist()
    predictions = pq.read_table(folder / "predictions.parquet").to_pylist()
    assert [(row["draw"], row["labels_per_class"], row["num_images"]) for row in numbers] == [
        (0, 4, 30),
        (1, 4, 30),
    ]
    for row in numbers:
        mine = [p["label"] == p["prediction"] for p in predictions if p["draw"] == row["draw"]]
        assert row["value"] == pytest.approx(np.mean(mine))
    assert all(0.5 <= p["probability"] <= 1 for p in predictions), "the larger one of two classes"
    temperature = results[0].metrics["temperature"]
    for p in predictions:
        assert p["top5"] == [p["prediction"], 1 - p["prediction"]]
        assert p["nll"] == pytest.approx(-np.log(p["top5_probabilities"][p["top5"].index(p["label"])]), abs=1e-5)
        odds = np.divide(*p["top5_probabilities"]) ** (1 / temperature)
        assert p["calibrated_probability"] == pytest.approx(odds / (1 + odds), abs=1e-5)
    assert load_model(folder)[1].class_names == ("left", "right")


@pytest.mark.ray
def test_a_single_rate_is_not_swept_and_says_so(dataset, tmp_path, local_ray, capsys):
    """Nor are there folds: no class has so many images."""
    config = configuration(labels=Labels(use_dev=False, folds=1_000), learning_rates=(1e-2,), steps=60)
    result = finetune.main(context(tmp_path, dataset, config))
    assert "nothing to choose: learning rate 0.01" in capsys.readouterr().out
    folder = tmp_path / "artifacts/finetune/k/attempts/1/files"
    sweep = json.loads((folder / "sweep.json").read_text())
    assert sweep == {"trials": [], "chosen": 1e-2, "selected_on": finetune.ONE_RATE}
    assert "validation_accuracy" not in result.metrics
    (row,) = pq.read_table(folder / "rows.parquet").to_pylist()
    assert row["selected_on"] == finetune.ONE_RATE
    assert row["value"] == result.metrics["test_accuracy"] > 0.9, "it was fitted all the same"


@pytest.mark.ray
def test_with_early_stopping_dev_also_chooses_the_last_step(dataset, tmp_path, local_ray):
    """Also of a single rate, for which there is a trial then; by another metric than accuracy."""
    config = configuration(
        labels=Labels(),
        learning_rates=(3e-2,),
        steps=40,
        early_stopping={"evaluations": 10, "patience": 2},
        select_by="macro-F1",
    )
    result = finetune.main(context(tmp_path, dataset, config))
    folder = tmp_path / "artifacts/finetune/k/attempts/1/files"
    sweep = json.loads((folder / "sweep.json").read_text())
    (trial,) = sweep["trials"]
    last = sweep["stopped_at"]
    assert trial["steps"] == [last] and last < 40
    assert sweep["selected_on"] == "dev, by macro-F1" and trial["selected_by"].keys() == {"macro-F1"}
    lines = decode_lines((folder / "log.jsonl").read_bytes(), "log.jsonl")
    steps = {name: [line.step for line in lines if line.fit == name] for name in {line.fit for line in lines}}
    assert steps.keys() == {"trial-0-0", f"refit-0-{last}-0"}
    assert max(steps["trial-0-0"]) == last + 8 and max(steps[f"refit-0-{last}-0"]) == last
    (row,) = pq.read_table(folder / "rows.parquet").to_pylist()
    assert json.loads(row["settings"])["stopped_at"] == result.metrics["stopped_at_step"] == last


@pytest.mark.ray
def test_a_mistake_in_a_trial_is_told_as_it_was_made(dataset, tmp_path, local_ray):
    with pytest.raises(ValueError, match="diverged with every rate of the sweep"):
        finetune.main(context(tmp_path / "store", dataset, configuration(learning_rates=(1e30, 1e31))))


@pytest.mark.parametrize(("error", "is_shown"), [(SystemExit(1), False), (ValueError("lost"), True)])
def test_the_end_of_a_trials_process_is_no_traceback(
    error: BaseException, is_shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Collected:
        def __del__(self) -> None:
            raise error

    monkeypatch.setattr(sys, "unraisablehook", _show_unraisable)
    Collected()
    assert ("Exception ignored in" in capsys.readouterr().err) is is_shown
