"""The report against numpy, on artifacts made here and committed to a real store; no Ray."""

from __future__ import annotations

import html
import html.parser
import io
import json
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from rich.console import Console
from sklearn.metrics import precision_recall_fscore_support

from pipelines.results.accuracies import accuracy_table, metrics_table, verdict_lines
from pipelines.results.card import facts_of, render
from pipelines.spec import (
    LAST,
    AnyStage,
    Audit,
    Baselines,
    Evaluate,
    Finetune,
    Labels,
    ModelSize,
    Pretrain,
    Segment,
)
from pipelines.spec.published import published
from pipelines.store import InputRef, Layout, LogLine, Manifest, commit, input_ref, open_store
from ray_jobs.data import shards
from ray_jobs.data.columns import Sample
from ray_jobs.data.images import sample_id
from ray_jobs.evaluation.intervals import mean_interval, paired_difference
from ray_jobs.evaluation.label_issues import LABEL_ISSUES
from ray_jobs.evaluation.metrics import COMPUTED
from ray_jobs.evaluation.rows import (
    MEAN_IOU,
    PREDICTIONS,
    PROBABILITIES,
    ROWS,
    Truth,
    measurement,
    write_predictions,
    write_table,
)
from ray_jobs.reporting.figures import measured_in_training
from ray_jobs.reporting.gather import _why_ended
from ray_jobs.reporting.lines import MAX_ISSUES, uncalibrated
from ray_jobs.reporting.page import templates
from tests.support import datasets
from tests.support.records import make_manifest
from tests.support.reports import make_report
from tests.support.scores import Scores, put_scores
from tests.support.vits import contract_for

HOSTILE = ("<b>evil</b>", "$\\frac{$ & \"x\" onload='alert(1)'", "</svg><script>alert(1)</script>")
NOTES = ("test is <b>theirs</b>",)
SIZE = ModelSize(patch_size=2, width=8, depth=1, num_heads=1)
PRETRAIN = Pretrain(job="pretrain", data="letters", model=SIZE, resolution=8, steps=3, batch_size=4, learning_rate=0.1)
SWEEP = {
    "trials": [{"learning_rate": rate, "accuracies": [0.5, 0.75], "losses": [1.0, 1.0]} for rate in (0.1, 0.01)],
    "chosen": 0.01,
    "selected_on": "folds",
}
OVER = {"learning_rate": (0.1, 0.01), "mixup": (0.0, 0.2)}
POINTS = [{"learning_rate": rate, "mixup": alpha} for rate in (0.1, 0.01) for alpha in (0.0, 0.2)]
SEARCH = {
    "trials": [
        {
            "learning_rate": rate,
            "accuracies": [0.5],
            "losses": [1.0],
            "number": number,
            "point": POINTS[number],
        }
        | ({"pruned_at": 1} if number == 3 else {})
        for number, rate in enumerate((0.1, 0.1, 0.01, 0.01))
    ],
    "chosen": 0.1,
    "chosen_trial": 1,
    "chosen_point": POINTS[1],
    "kind": "grid",
    "selected_on": "dev",
}
SWEEPS = {None: SWEEP, "grid": SEARCH}  # by the kind of search
CURVES = [{"draw": draw, "points": [{"step": 3, "learning_rate": 0.1, "loss": 1.0 + draw}]} for draw in (0, 1)]
PROBABILITY = 0.75
TUNED = {"probability": PROBABILITY, "nll": 0.25, "top5": [0, 1, 2]}  # every answer of a fine-tuned model


def finetune(per_class: int | None, backbone: str | None = None) -> Finetune:
    """A fine-tuning's configuration, with or without a backbone."""
    start = {"backbone": backbone} if backbone else {"model": SIZE, "resolution": 8}
    labels = Labels(per_class=per_class, seed=3)
    fields = {"labels": labels, "learning_rates": (0.1, 0.01), "steps": 3, "batch_size": 4}
    return Finetune.model_validate({"job": "finetune", "data": "digits", **start, **fields})


def baselines(per_class: int | None, seed: int = 3) -> Baselines:
    """Baselines' configuration."""
    return Baselines(job="baselines", data="digits", labels=Labels(per_class=per_class, seed=seed))


class Artifacts:
    """A store to commit artifacts to, as the stages would."""

    def __init__(self, folder: Path) -> None:
        self.store = open_store(str(folder))
        self.made: dict[str, Manifest] = {}

    def commit(self, stage: str, job: str, kind: Any, files: Mapping[str, bytes], **fields: Any) -> Manifest:
        """Commit an artifact with these files; its key is made of its stage's name."""
        key = f"{stage.encode().hex():0<64}"[:64]
        with self.store.staging(Layout.files(job, key, 1)) as staging:
            for name, data in files.items():
                path = staging.path / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        manifest = make_manifest(
            job,
            kind=kind,
            key=key,
            content_digest=key,
            stage=stage,
            run="run",
            files=staging.files,
            code={"version": 1, "digest": "c" * 64, "git": "d" * 40, "dirty": False},
            environment={
                "python": "3.11",
                "machine": "x86_64",
                "processor": "A processor",
                "cluster": {"CPU": 2.0},
                "packages": {"torch": "2.13.0"},
            },
            started="2026-11-21T08:00:00+00:00",
            finished="2026-11-21T08:01:30+00:00",
            user="me@here",
            **fields,
        )
        self.made[stage] = commit(self.store, manifest)
        return self.made[stage]

    def dataset(
        self,
        stage: str,
        names: Sequence[str],
        splits: Mapping[str, tuple[Sequence[np.ndarray], Sequence[int]]],
    ) -> dict[str, list[str]]:
        """Commit a dataset of images [h, w, c] with labels; returns the sample ids of each split."""
        ids, parts = {}, {}
        raw = all(image.shape[-1] == 1 for images, _ in splits.values() for image in images)
        for split, (images, labels) in splits.items():
            samples = [
                _sample(f"{split}/{i}", image, int(label), raw)
                for i, (image, label) in enumerate(zip(images, labels, strict=True))
            ]
            parts[split] = samples
            ids[split] = [sample.sample_id for sample in samples]
        height, width = splits["train"][0][0].shape[:2]
        image = shards.ImageSize(height=height, width=width, channels=1) if raw else None
        folder = self.store.root / "dataset"
        datasets.put(folder, stage, names, image, parts, notes=NOTES)
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        files["quarantine.parquet"] = _parquet(pa.table({"key": ["broken.png"], "reason": ["cut off"]}))
        self.commit(stage, "ingest", "dataset", files)
        return ids

    def scores(self, stage: str, scores: Sequence[Scores], config: AnyStage, **inputs: str) -> Manifest:
        """Commit scores as the artifact of a stage, a fine-tuning with its sweep."""
        found = []
        for score in scores:
            tuned = [TUNED] * len(score.truth.ids) if score.protocol == "fine-tuning" else None
            table = tuned and pa.Table.from_pylist(tuned, PROBABILITIES)
            found += score.scored("folds", {"c": 1.0, "exact": True}, table)
        folder = self.store.root
        put_scores(folder, found)
        files = {name: (folder / name).read_bytes() for name in ("rows.parquet", "predictions.parquet")}
        if isinstance(config, Finetune):
            files["sweep.json"] = json.dumps(SWEEPS[config.search and config.search.kind]).encode()
            files["curves.json"] = json.dumps(CURVES).encode()
        fields = {"config": config.model_dump(mode="json"), "inputs": self.references(**inputs)}
        return self.commit(stage, config.job, config.KIND, files, **fields)

    def references(self, **inputs: str) -> dict[str, list[InputRef]]:
        """What a manifest says of its inputs, field -> stage."""
        return {field: [input_ref(self.store, self.made[stage])] for field, stage in inputs.items()}

    def make(self, *stages: str, **fields: Any) -> dict[str, bytes]:
        """The files of a report of these stages."""
        return make_report(self.store, [self.made[stage] for stage in stages], **fields)


def _sample(key: str, image: np.ndarray, label: int, raw: bool) -> Sample:
    data = image.tobytes()
    if not raw:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "PNG")
        data = buffer.getvalue()
    height, width, channels = image.shape
    identity, form = sample_id(sha256(data).digest(), key), "raw" if raw else "png"
    return Sample(identity, key, data, form, width, height, channels, label)


def _parquet(table: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def _guesses(rng: np.random.Generator, labels: np.ndarray, draws: int, rate: float) -> np.ndarray:
    """Predictions [draws, n] of three classes that are right at about this rate."""
    shape = (draws, len(labels))
    return np.where(rng.random(shape) < rate, labels, (labels + rng.integers(1, 3, shape)) % 3)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    """A small pipeline: letters, three classes of digits, a pretrained model, all that is measured of it."""
    made = Artifacts(tmp_path_factory.mktemp("report") / "store")
    rng = np.random.default_rng(0)

    def images(n: int) -> tuple[list[np.ndarray], list[int]]:
        return list(rng.integers(0, 256, (n, 8, 8, 1), dtype=np.uint8)), [i % 3 for i in range(n)]

    made.dataset("letters", [f"letter {i}" for i in range(3)], {"train": images(30), "dev": images(6)})
    splits = {"train": images(60), "dev": images(12), "test": images(40)}
    ids, labels = made.dataset("digits", ["zero", "one", "two"], splits)["test"], np.array(splits["test"][1])
    truth = Truth("digits", ids, labels)
    steps = (1, 2, 3)
    curve = [{"step": step, "loss": 2.0 / step, "learning_rate": 0.1, "dev_accuracy": None} for step in steps]
    made.commit(
        "pretrain",
        "pretrain",
        "model",
        {"curve.json": json.dumps(curve).encode()},
        config=PRETRAIN.model_dump(mode="json"),
        inputs=made.references(data="letters"),
    )
    rates = {"ViT, pretrained": 0.9, "ViT, untrained": 0.3, "pixels": 0.5, "pixels, standardised": 0.6}
    few_shot = [
        Scores(method, "few-shot linear", shots, _guesses(rng, labels, 4, rate), truth)
        for shots in (1, 5)
        for method, rate in rates.items()
    ]
    evaluate = Evaluate(job="evaluate", data="digits", backbone="pretrain", seed=7)
    made.scores("evaluate", few_shot, evaluate, data="digits", backbone="pretrain")
    for stage, method, rate in (("finetune", "ViT, pretrained", 0.8), ("scratch", "ViT, from scratch", 0.4)):
        scores = [Scores(method, "fine-tuning", 10, _guesses(rng, labels, 3, rate), truth)]
        backbone = {"backbone": "pretrain"} if stage == "finetune" else {}
        made.scores(stage, scores, finetune(10, **backbone), data="digits", **backbone)
    scores = [Scores("RBF SVM", "baseline", 10, _guesses(rng, labels, 3, 0.8), truth)]
    made.scores("baselines", scores, baselines(10), data="digits")
    return made


ALL = ("letters", "digits", "pretrain", "evaluate", "finetune", "scratch", "baselines")


@pytest.fixture(scope="module")
def files(artifacts: Artifacts) -> dict[str, bytes]:
    """The files of a report of all of it."""
    return artifacts.make(*ALL)


def _correct(files: dict[str, bytes], stage: str, method: str, per_class: int) -> np.ndarray:
    """Which predictions were right [draws, n], from the report's own predictions.parquet."""
    table = pq.read_table(io.BytesIO(files["predictions.parquet"])).to_pylist()
    rows = [
        row for row in table if (row["stage"], row["method"], row["labels_per_class"]) == (stage, method, per_class)
    ]
    draws = sorted({row["draw"] for row in rows})
    by_draw = [
        sorted((row["sample_id"], row["label"] == row["prediction"]) for row in rows if row["draw"] == draw)
        for draw in draws
    ]
    return np.array([[right for _, right in draw] for draw in by_draw])


def searched_page(folder: Path, search: dict[str, Any]) -> str:
    """The text of the report of a fine-tuning that was searched."""
    made = Artifacts(folder / "store")
    pixels = list(np.zeros((6, 8, 8, 1), np.uint8))
    splits = {split: (pixels[:size], [i % 2 for i in range(size)]) for split, size in (("train", 4), ("test", 6))}
    ids, labels = made.dataset("digits", ["zero", "one"], splits)["test"], np.array(splits["test"][1])
    truth = Truth("digits", ids, labels)
    fields = {"learning_rates": (), "search": search}
    config = Finetune.model_validate(finetune(None).model_dump() | fields)
    scores = [Scores("ViT, from scratch", "fine-tuning", None, labels[None], truth)]
    made.scores("searched", scores, config, data="digits")
    page = made.make("digits", "searched")["report.html"].decode()
    return re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", page))


def test_a_search_is_described_and_drawn(tmp_path: Path) -> None:
    text = searched_page(tmp_path, {"kind": "grid", "over": OVER})
    assert "the 4 trials of its search (grid)" in text
    assert "1 trial (hollow) was ended early" in text
    assert "search: over learning rate (0.1, 0.01), mixup (0.0, 0.2)" in text


def test_why_asha_ended_trials_is_said() -> None:
    config = {"steps": 20, "search": {"kind": "asha", "evaluations": 9, "reduction_factor": 3}}
    ends = [(3, {}), (3, {}), (7, {}), (None, {}), (10, {"steps": 30})]
    trials = [{"point": point} | ({"pruned_at": end} if end else {}) for end, point in ends]
    why = "2 at evaluation 1, 2 at evaluation 3 of 9, because they were in the lower 2/3"
    assert _why_ended(trials, config)["why_ended"].startswith(why)
    assert _why_ended(trials, {"steps": 20, "search": {"kind": "grid"}}) == {}


@pytest.mark.parametrize(
    ("changes", "images", "right", "shown"),
    [
        ({"seed": 5}, 3669, 3441, "inside"),
        ({}, 3669, 3600, "outside"),
        ({"steps": 501}, 3669, 3441, None),
        ({}, 3668, 3441, None),
    ],
)
def test_a_published_accuracy_is_shown_only_beside_its_own_protocol(
    tmp_path: Path, changes: dict[str, Any], images: int, right: int, shown: str | None
) -> None:
    row, made = published()["augreg_b32_pets"], Artifacts(tmp_path / "store")
    config, *inputs = row.stages()
    for stage in inputs:
        made.commit(stage.job, stage.job, stage.KIND, {}, config=stage.model_dump(mode="json"))
    labels = np.arange(images) % 2
    answers = np.where(np.arange(images) < right, labels, 1 - labels)[None]
    truth = Truth("Pets, whole", [f"{number:04d}" for number in range(images)], labels)
    scores = [Scores("ViT, pretrained", "fine-tuning", None, answers, truth)]
    config = config.model_copy(update=changes)
    tuned = made.scores("tuned", scores, config, data="ingest", backbone="import")
    files = made.make("tuned")
    expected = f"published: 93.78%, {row.source}; {shown} this 95% interval"
    (line,) = json.loads(files["report.json"])["accuracies"]
    assert line.get("published") == (shown and expected)
    facts = facts_of(made.store, tuned, LAST)
    contract = contract_for(SIZE.architecture(8, 3, 2), ["cat", "dog"])
    card = render(facts, contract, "npz", "place", [])
    for text in (html.unescape(files["report.html"].decode()), card.replace("\\", "")):
        assert text.count("published: ") == bool(shown) and (not shown or expected in text)


def test_numbers_are_those_of_the_predictions(files: dict[str, bytes]) -> None:
    numbers = json.loads(files["report.json"])
    page = files["report.html"].decode()
    assert len(numbers["accuracies"]) == 8 + 3
    for line in numbers["accuracies"]:
        correct = _correct(files, line["stage"], line["method"], line["labels_per_class"])
        assert line["accuracy"] == pytest.approx(correct.mean(), abs=1e-12)
        assert (line["draws"], line["num_images"]) == correct.shape
        assert (line["low"], line["high"]) == mean_interval(correct)[1:]
        assert f"{100 * correct.mean():.1f}%" in page
        assert line["artifact"][:12] in page


def test_verdict_compares_pairs_with_the_best_reference_of_each_sort(files: dict[str, bytes]) -> None:
    numbers = json.loads(files["report.json"])
    found = {(v["protocol"], v["labels_per_class"], v["reference"]): v for v in numbers["verdicts"]}
    pixels = max(("pixels", "pixels, standardised"), key=lambda name: _correct(files, "evaluate", name, 5).mean())
    assert set(found) == {
        ("few-shot linear", 5, "ViT, untrained"),
        ("few-shot linear", 5, pixels),
        ("fine-tuning", 10, "ViT, from scratch"),
        ("fine-tuning", 10, "RBF SVM"),
    }
    ours = _correct(files, "finetune", "ViT, pretrained", 10)
    for stage, reference in (("scratch", "ViT, from scratch"), ("baselines", "RBF SVM")):
        expected = paired_difference(ours, _correct(files, stage, reference, 10))
        verdict = found["fine-tuning", 10, reference]
        assert (verdict["difference"], verdict["low"], verdict["high"]) == expected
    assert found["fine-tuning", 10, "ViT, from scratch"]["conclusion"] == "above zero"
    assert found["fine-tuning", 10, "RBF SVM"]["conclusion"] == "not told from zero"
    few, ten = found["few-shot linear", 5, pixels], found["fine-tuning", 10, "RBF SVM"]
    low, high = (f"{100 * few[bound]:.1f}" for bound in ("low", "high"))
    ends = " to ".join(f"{100 * ten[bound]:.1f}".replace("-", "−") for bound in ("low", "high"))
    assert numbers["question"] == "Which method is best?"
    assert ten["reference_accuracy"] > found["fine-tuning", 10, "ViT, from scratch"]["reference_accuracy"]
    assert numbers["headline"] == (
        f"The pretrained ViT reaches {few['accuracy']:.1%} with 5 labels per class (linear probe) on 40 test images,"
        f" {100 * few['difference']:.1f} points (95% interval {low} to {high}) above"
        f" {few['reference'].replace('pixels', 'the same probe on pixels')} at {few['reference_accuracy']:.1%};"
        " with 10 labels per class (fine-tuned), not clearly different from the best classifier on pixels, RBF SVM at"
        f" {ten['reference_accuracy']:.1%} (95% interval of the difference: {ends} points)."
    )
    assert [v["reference_kind"] for v in numbers["verdicts"]] == ["untrained", "pixels", "scratch", "pixels"]


def test_verdict_says_what_holds_for_all_comparisons_at_once(files: dict[str, bytes]) -> None:
    """The family is all comparisons of the report; the single comparison of another report needs no such sentence."""
    numbers = json.loads(files["report.json"])
    ours = _correct(files, "finetune", "ViT, pretrained", 10)
    for verdict in numbers["verdicts"]:
        adjusted = verdict["adjusted_low"], verdict["adjusted_high"]
        assert adjusted[0] < verdict["low"] <= verdict["high"] < adjusted[1]
        if verdict["reference"] == "ViT, from scratch":
            theirs = _correct(files, "scratch", "ViT, from scratch", 10)
            assert adjusted == paired_difference(ours, theirs, comparisons=4)[1:]
    above = sum(verdict["adjusted_low"] > 0 for verdict in numbers["verdicts"])
    page = files["report.html"].decode()
    assert (
        "3 of 4 intervals of differences lie above zero, 0 below;"
        f" adjusted for all 4 comparisons (Bonferroni), {above} lie above." in page
    )


def test_a_loss_is_said_plainly(artifacts: Artifacts) -> None:
    truth = _tested(artifacts)
    labels = truth.labels
    ours, theirs = labels.copy(), labels.copy()
    ours[:30], theirs[:3] = (labels[:30] + 1) % 3, (labels[:3] + 1) % 3
    scratch = [Scores("ViT, from scratch", "fine-tuning", None, ours[None], truth)]
    artifacts.scores("tune", scratch, finetune(None), data="digits")
    nearest = [Scores("k-NN", "baseline", None, theirs[None], truth)]
    artifacts.scores("base", nearest, baselines(None), data="digits")
    numbers = json.loads(artifacts.make("digits", "tune", "base")["report.json"])
    (verdict,) = numbers["verdicts"]
    assert verdict["conclusion"] == "below zero" and ", below zero)." in verdict["sentence"]
    assert verdict["difference"] == pytest.approx(-27 / 40)
    assert verdict_lines(numbers)[1] == numbers["advice"] != ""


def test_nothing_is_said_of_a_choice_that_was_none(artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch) -> None:
    """One learning rate is no sweep, and the most frequent class is no method that got an image right."""
    monkeypatch.setitem(SWEEPS, None, SWEEP | {"trials": SWEEP["trials"][1:]})
    truth = _tested(artifacts)
    wrong = (truth.labels + 1) % 3
    tuned = [Scores("ViT, from scratch", "fine-tuning", None, wrong[None], truth)]
    artifacts.scores("given", tuned, finetune(None), data="digits")
    others = [Scores(name, "baseline", None, truth.labels[None], truth) for name in ("k-NN", "most frequent class")]
    artifacts.scores("simple", others, baselines(None), data="digits")
    files = artifacts.make("digits", "given", "simple")
    numbers, page = json.loads(files["report.json"]), files["report.html"].decode()
    assert numbers["sweeps"] == [] and not re.search("learning-rate sweep|and sweeps", page)
    assert "chosen learning rate" not in page
    assert {(each["methods"], each["methods_right"]) for each in numbers["mistakes"]["worst"]} == {(2, 1)}
    selected = {line["method"]: line["selected_on"] for line in numbers["accuracies"]}
    assert selected["most frequent class"] == [] != selected["k-NN"]
    splits = numbers["datasets"][0]["splits"]
    learned = f"learn from training and dev images, {splits['train'] + splits['dev']}."
    assert (learned in page) == (splits["dev"] > 0)


@pytest.mark.slow
def test_other_label_draws_or_images_are_never_paired(artifacts: Artifacts) -> None:
    truth = _tested(artifacts)
    others = Truth("digits", [f"{i:032d}" for i in range(40)], truth.labels)
    guesses = _guesses(np.random.default_rng(1), truth.labels, 3, 0.1)
    for stage, tested, seed in (("other draws", truth, 4), ("other images", others, 3)):
        scores = [Scores("k-NN", "baseline", 10, guesses, tested)]
        artifacts.scores(stage, scores, baselines(10, seed=seed), data="digits")
    for stage, verdicts in (("other draws", 0), ("other images", 0), ("baselines", 1)):
        numbers = json.loads(artifacts.make("finetune", stage)["report.json"])
        assert len(numbers["verdicts"]) == verdicts, stage
        assert len(numbers["accuracies"]) == 2


def _tested(artifacts: Artifacts) -> Truth:
    """The digits' test split."""
    digits = shards.open_dataset(artifacts.store.local(artifacts.made["digits"].folder, ()))
    return Truth("digits", digits.sample_ids("test"), digits.labels("test"))


def test_tables_keep_every_row_and_say_where_it_is_from(artifacts: Artifacts, files: dict[str, bytes]) -> None:
    for name, schema in (("rows.parquet", ROWS), ("predictions.parquet", PREDICTIONS)):
        table = pq.read_table(io.BytesIO(files[name]))
        assert table.schema.names == ["artifact", "stage", *schema.names]
        for stage in ("evaluate", "finetune", "scratch", "baselines"):
            manifest = artifacts.made[stage]
            mine = table.filter(pa.compute.equal(table["artifact"], manifest.key))
            assert set(mine["stage"].to_pylist()) == {stage}
            original = pq.read_table(artifacts.store.local(manifest.folder, ()) / name)
            assert mine.select(schema.names).to_pylist() == original.to_pylist()


@pytest.mark.slow
def test_same_inputs_give_the_same_bytes(artifacts: Artifacts, files: dict[str, bytes]) -> None:
    assert files.keys() == {"report.html", "report.json", "rows.parquet", "predictions.parquet"}
    assert artifacts.make(*ALL) == files


def test_the_worst_mistakes_are_those_most_often_wrong(files: dict[str, bytes]) -> None:
    errors = json.loads(files["report.json"])["mistakes"]
    correct = _correct(files, "finetune", "ViT, pretrained", 10)
    assert errors["stage"] == "finetune"
    assert errors["ever_wrong"] == (~correct).any(axis=0).sum()
    wrong = np.sort((~correct).sum(axis=0))[::-1]
    assert [mistake["wrong_draws"] for mistake in errors["worst"]] == wrong[wrong > 0][:24].tolist()
    counts = np.array(errors["confusion"]["counts"])
    assert counts.trace() == correct.sum() and counts.sum() == correct.size
    page = files["report.html"].decode()
    assert page.count('alt="test image') == len(errors["worst"])  # each is shown
    for mistake in errors["worst"]:
        assert mistake["probability"] == PROBABILITY and mistake["file"].startswith("test/")
        assert mistake["file"] in page
    assert "75.0%" in page
    assert page.count(">above</a>") == 2, "of evaluations; a stage without metrics has none above"


def test_methods_with_probabilities_say_what_they_are_worth(files: dict[str, bytes]) -> None:
    accuracies = json.loads(files["report.json"])["accuracies"]
    for line in accuracies:
        assert (line["probabilities"] is not None) == (line["protocol"] == "fine-tuning")
    table = pq.read_table(io.BytesIO(files["predictions.parquet"])).to_pandas()
    for line in (line for line in accuracies if line["probabilities"]):
        own = table[(table["stage"] == line["stage"]) & (table["labels_per_class"] == line["labels_per_class"])]
        draws = [draw for _, draw in own.groupby("draw")]
        gaps = [abs(draw["correct"].mean() - PROBABILITY) for draw in draws]
        assert line["probabilities"] == {
            "nll": 0.25,
            "calibration_error": pytest.approx(np.mean(gaps)),
            "top5_accuracy": None,  # of three classes, all are among the five
            "calibrated": None,
        }
    page = files["report.html"].decode()
    assert "Calibration<br>error" in page and "Top-5" not in page
    assert "NLL,<br>calibrated" not in page and "minimises the NLL" not in page, "no value, no column"


def test_a_missing_temperature_has_all_of_its_reasons() -> None:
    calibrated = {"nll": 0.1, "calibration_error": 0.05}
    measured = {"top5_accuracy": None, "calibrated": calibrated, **calibrated}
    line = {"method": "ViT", "task": "t", "labels": "all labels", "stage": "s", "artifact": "a" * 12}
    given: dict[str, Any] = dict.fromkeys(("vtab", "costs", "groups", "other_metrics", "other_groups"), ())
    template = templates().get_template("scores.html.j2")
    page = template.render(accuracies=[line | {"probabilities": measured}], **given)
    assert "no such temperature without a sweep, with early stopping, or if a fold's held-out images are all" in page


def test_a_temperature_of_folds_without_errors_calibrates_nothing() -> None:
    """By the accuracies of the chosen trial: of a rate, or of a search's number."""

    def sweep(artifact: str, *accuracies: float, **fields: Any) -> dict[str, Any]:
        trials = [
            {"number": number, "learning_rate": 10.0**-number, "accuracies": own}
            for number, own in enumerate(([1.0, 1.0], list(accuracies)))
        ]
        return {"artifact": artifact, "trials": trials, "chosen": 0.1, **fields}

    sweeps = [
        sweep("errors", 0.9, 0.95),
        sweep("none in a fold", 0.9, 1.0),
        sweep("search", 0.9, 0.9, kind="random", chosen_trial=1),
    ]
    metrics: dict[str, dict[str, float | int | str]] = {
        **{each["artifact"]: {"temperature": 0.8} for each in sweeps},
        "at the bound": {"temperature": 0.05},
        "has none": {},
    }
    assert uncalibrated(metrics, sweeps) == {"none in a fold", "at the bound"}


def test_a_single_detector_was_not_chosen() -> None:
    found = {
        "task": "birds",
        "stage": "s",
        "artifact": "a" * 12,
        "draws": 1,
        "apart": False,
        "boxes": 9,
        "num_images": 9,
    }
    found |= dict.fromkeys(("value", "low", "behind", "spread", "AP50", "AP75", "AP small", "AP medium", "AP large"))
    found["errors"] = dict.fromkeys(("right", "class", "place", "double", "background", "missed"), 0)
    lines = [found | {"method": method} for method in ("ViT", "the median box", "ResNet")]
    template = templates().get_template("detections.html.j2")
    for some, is_chosen in ((lines[:2], False), (lines, True)):
        page = template.render(detectors=some, figures={"precision birds": ""}, detected={})
        assert ("The best is chosen on test" in page) == is_chosen


def test_results_of_one_of_several_draws_say_so() -> None:
    model = {"method": "ViT", "protocol": "fine-tuning", "stage": "s", "artifact": "a" * 12, "task": "halves"}
    model |= {"wrong": 1, "num_images": 9, "draws": 2, "classes": [], "worst": []}
    page = templates().get_template("mistakes.html.j2").render(mistakes=None, several_labels=[model], images={})
    assert "F1, recall and precision at each class's threshold, all of draw 0." in page


def test_metrics_of_predictions_have_columns_on_the_page(files: dict[str, bytes]) -> None:
    page = files["report.html"].decode()
    for line in json.loads(files["report.json"])["accuracies"]:
        values = {each["metric"]: each["value"] for each in line["metrics"]}
        assert values.keys() == {metric.name for metric in COMPUTED}
        assert all(0 <= each["low"] < each["value"] < each["high"] <= 1 for each in line["metrics"])
        assert f"{values['macro-F1']:.1%}<small>" in page


def test_each_class_has_its_recall_its_precision_and_its_rival(files: dict[str, bytes]) -> None:
    """Against scikit-learn, over all draws."""
    table = pq.read_table(io.BytesIO(files["predictions.parquet"])).to_pylist()
    mine = [row for row in table if row["stage"] == "finetune"]
    labels, answers = (np.array([row[name] for row in mine]) for name in ("label", "prediction"))
    precision, recall, _, _ = precision_recall_fscore_support(labels, answers)
    lines = json.loads(files["report.json"])["mistakes"]["classes"]
    assert [line["recall"] for line in lines] == sorted(recall)
    for line in lines:
        label = line["label"]
        assert line["name"] == ("zero", "one", "two")[label]
        assert (line["recall"], line["precision"]) == pytest.approx((recall[label], precision[label]))
        assert 3 * line["num_images"] == np.count_nonzero(labels == label)
        counts = np.bincount(answers[(labels == label) & (answers != label)], minlength=3)
        assert line["confused_with"] == counts.argmax()
        assert line["confused"] == pytest.approx(counts.max() / np.count_nonzero(labels == label))
    page, line = re.sub("<.*?>", "", files["report.html"].decode()), lines[0]
    assert (
        f"{line['name']} {line['recall']:.1%} of {line['num_images']} images right, most often taken for"
        f" {line['confused_name']} ({line['confused']:.1%})" in page
    )


def test_the_curve_of_every_fine_tuning_is_shown(files: dict[str, bytes]) -> None:
    numbers, page = json.loads(files["report.json"]), files["report.html"].decode()
    assert [tuned["stage"] for tuned in numbers["finetuning"]] == ["finetune", "scratch"]
    assert all(tuned["draws"] == CURVES for tuned in numbers["finetuning"])
    assert page.count("one line per draw of labels") == 2


class _Page(html.parser.HTMLParser):
    """Collects a page's elements, attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_class_is_rare_beside_a_larger_one_and_shown_if_it_has_images(tmp_path: Path) -> None:
    """The largest of three classes was named among the fewest, and a class without images made the others random."""
    made = Artifacts(tmp_path / "store")
    made.dataset("pets", ["cat", "dog", "axolotl"], {"train": (list(np.zeros((4, 8, 8, 1), np.uint8)), [0, 1, 1, 1])})
    page = made.make("pets")["report.html"].decode()
    assert "fewest: axolotl, cat)" in page and "random classes" not in page
    assert "1 image could not be used and was left out" in page


@pytest.mark.slow
def test_photographs_with_hostile_class_names_of_one_method(tmp_path: Path) -> None:
    made, rng = Artifacts(tmp_path / "store"), np.random.default_rng(0)

    def photos(n: int) -> tuple[list[np.ndarray], list[int]]:
        sizes = rng.integers(40, 200, (n, 2))
        return [rng.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in sizes], [i % 3 for i in range(n)]

    splits = {"train": photos(12), "test": photos(9)}
    ids = made.dataset("photos", HOSTILE, splits)["test"]
    predictions = np.array([[0, 1, 2, 1, 1, 2, 0, 2, 0]])
    truth = Truth("photos", ids, np.array(splits["test"][1]))
    scores = [Scores("ViT, from scratch", "fine-tuning", None, predictions, truth)]
    made.scores("train", scores, finetune(None), data="photos")
    files = made.make("photos", "train", title="<i>mine</i>")
    page = _Page(files["report.html"].decode())
    assert json.loads(files["report.json"])["datasets"][0]["notes"] == list(NOTES)
    assert "test is &lt;b&gt;theirs" in files["report.html"].decode()
    assert page.tags.count("script") == 1 and "i" not in page.tags
    assert not any(name.startswith("on") for name, _ in page.attributes)
    for text in (*HOSTILE, "<i>mine</i>"):
        assert text in page.text
    sources = [value or "" for name, value in page.attributes if name in {"src", "href", "xlink:href"}]
    # nothing is fetched
    assert sources and all(value.startswith(("data:image/", "data:,", "#")) for value in sources)
    assert "http" not in files["report.html"].decode().replace("http://www.w3.org/", "")
    numbers = json.loads(files["report.json"])
    assert numbers["verdicts"] == [] and "not compared with another method" in numbers["headline"]
    assert numbers["accuracies"][0]["accuracy"] == pytest.approx(6 / 9)


@pytest.mark.parametrize("stages", [("letters",), ("pretrain",), ("evaluate",), ("finetune",), ("digits", "baselines")])
def test_any_part_may_be_missing(artifacts: Artifacts, stages: tuple[str, ...]) -> None:
    files = artifacts.make(*stages)
    numbers, page = json.loads(files["report.json"]), files["report.html"].decode()
    assert page.endswith("</html>\n")
    assert [stage["stage"] for stage in numbers["stages"]] == list(stages)
    accuracy_table(numbers)
    assert verdict_lines(numbers)


def test_metrics_without_predictions_have_a_table_of_their_own(artifacts: Artifacts, tmp_path: Path) -> None:
    """The mean over draws, the best first; a report without such metrics has no word of them."""
    plain = artifacts.make("finetune")
    assert b"other_metrics" not in plain["report.json"] and b"Other metrics" not in plain["report.html"]
    rows = [
        measurement(
            {"task": "<i>shapes</i>", "protocol": "linear segmentation", "method": method}
            | {"labels_per_class": None, "draw": draw},
            MEAN_IOU,
            value,
            20,
            "dev",
            {"l2": 1.0},
        )
        for method, draw, value in (("pixels", 0, 0.25), ("ViT", 0, 0.5), ("ViT", 1, 0.75))
    ]
    write_table(tmp_path / "rows.parquet", rows, ROWS)
    write_predictions(tmp_path / "predictions.parquet", [])
    config = Segment(job="segment", data="digits", backbone="pretrain")
    artifacts.commit(
        "segment",
        "segment",
        "evaluation",
        {name: (tmp_path / name).read_bytes() for name in ("rows.parquet", "predictions.parquet")},
        config=config.model_dump(mode="json"),
        inputs=artifacts.references(data="digits", backbone="pretrain"),
        metrics={f"test_images_{name}": 3 for name in ("seen_in_training", "also_in_train")}
        | {"test_images_near_training_images": 0},
    )
    files = artifacts.make("digits", "pretrain", "segment")
    numbers, page = json.loads(files["report.json"]), files["report.html"].decode()
    assert numbers["accuracies"] == [] and numbers["verdicts"] == []
    lines = [(line["method"], line["value"], line["draws"]) for line in numbers["other_metrics"]]
    assert lines == [("ViT", 0.625, 2), ("pixels", 0.25, 1)]
    assert [line["seen"] for line in numbers["other_metrics"]] == [
        "seen in training: 3 test images, 3 also in its own train or dev",
        "",
    ]
    assert "62.5%" in page and "<i>shapes" not in page
    assert "mIoU: intersection over union" in page and "mAP of" not in page, "only what is in the table is explained"
    assert "test images have no interval" in page and "Intervals cover" not in page
    console = Console(file=io.StringIO(), width=80)
    console.print(metrics_table(numbers["other_metrics"]))
    assert "62.5" in console.file.getvalue() and "<i>shapes</i>, linear segmentation" in console.file.getvalue()


def test_the_terminal_shows_the_same_table(files: dict[str, bytes]) -> None:
    numbers = json.loads(files["report.json"])
    numbers["accuracies"][0]["method"] = "[red]not markup[/red]"
    console = Console(file=io.StringIO(), width=200)
    console.print(accuracy_table(numbers))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "[red]not markup[/red]" in shown
    for line in numbers["accuracies"]:
        assert f"{100 * line['accuracy']:.1f}" in shown and line["stage"] in shown
    same = [
        numbers["accuracies"][0] | {"accuracy": value, "method": name}
        for value, name in ((0.1, "worse"), (0.9, "better"))
    ]
    console.print(accuracy_table(numbers | {"accuracies": same}))
    assert console.file.getvalue().index("better") < console.file.getvalue().index("worse")
    lines = verdict_lines(numbers)
    assert verdict_lines(numbers | {"verdicts": numbers["verdicts"][:1]}) == lines[:1], "said once"
    assert lines[1:] == [verdict["sentence"] for verdict in numbers["verdicts"]]
    assert verdict_lines(numbers | {"missing": ["a", "b"]}) == [
        *lines,
        "Not made, so not in this report: a, b.",
    ]


def test_what_was_measured_during_a_training_is_that_of_dev_or_of_the_chosen_trials(
    artifacts: Artifacts,
) -> None:
    def line(step: int, **fields: Any) -> LogLine:
        return LogLine(time="2026-11-23T08:00:00+00:00", step=step, epoch=0.5, loss=1.0, learning_rate=0.1, **fields)

    lines = [line(1), line(2, dev_loss=0.9, dev_accuracy=0.5, few_shot={"5-shot dev": 0.4})]
    dev, few_shot = measured_in_training(lines, artifacts.made["pretrain"])
    assert (dev.steps, dev.accuracies, dev.losses) == ((2,), (0.5,), (0.9,))
    assert (few_shot.name, few_shot.accuracies) == ("5-shot dev, to watch only", (0.4,))

    tuned = artifacts.made["finetune"].model_copy(update={"metrics": {"learning_rate": 0.01}})
    fits = ("trial-1-0", "trial-1-1", "trial-0-0", "refit-1-0")
    lines = [line(3, fit=fit, dev_loss=0.9, dev_accuracy=0.5) for fit in fits]
    assert [each.name for each in measured_in_training(lines, tuned)] == ["fold 0", "fold 1"]


def test_likely_wrong_labels_are_shown_as_images(tmp_path: Path) -> None:
    """The first of them in their order, with hostile names, and the images only if the dataset is on the page."""
    made = Artifacts(tmp_path / "store")
    rng = np.random.default_rng(0)
    splits = {
        split: (list(rng.integers(0, 256, (n, 8, 8, 1), dtype=np.uint8)), [i % 3 for i in range(n)])
        for split, n in (("train", 120), ("dev", 6), ("test", 6))
    }
    ids = made.dataset("pets", HOSTILE, splits)
    named = [("train", identity) for identity in ids["train"]] + [("dev", identity) for identity in ids["dev"]]
    rows = [
        dict(
            zip(
                LABEL_ISSUES.names,
                (rank, each, HOSTILE[0], split, HOSTILE[1], HOSTILE[2], 0.125, 0.5),
                strict=True,
            )
        )
        for rank, (split, each) in enumerate(named[::-1], start=1)
    ]
    config = Audit(job="audit", data="pets", backbone="model")
    made.commit(
        "audit",
        "audit",
        "audit",
        {"label_issues.parquet": _parquet(pa.Table.from_pylist(rows, LABEL_ISSUES))},
        config=config.model_dump(mode="json"),
        inputs=made.references(data="pets", backbone="pets"),
        metrics={"audited": 126, "agreement": 0.5, "largest_class": 0.5, "label_issues": 126},
    )
    files = made.make("pets", "audit")
    (audit,) = json.loads(files["report.json"])["label_issues"]
    assert audit["num_issues"] == 126
    doubt = "the model agrees with only 50.0% of the labels"
    assert audit["headline"].startswith(doubt) and doubt in files["report.html"].decode()
    assert audit["issues"] == rows[:MAX_ISSUES]
    assert audit["pairs"] == [{"label": HOSTILE[1], "suggested": HOSTILE[2], "images": 126}]
    text = files["report.html"].decode()
    section = text[text.index(">Likely wrong labels</h2>") : text.index('<section id="data"')]
    assert section.count("<img") == MAX_ISSUES and "<script" not in section and HOSTILE[0] not in section
    assert section.index(ids["dev"][5]) < section.index(ids["train"][119]) and "12.5%" in section
    numbers = json.loads(files["report.json"])
    assert numbers["question"] == "Which labels are probably wrong?" and audit["headline"][1:] in numbers["headline"]
    alone = made.make("audit")["report.html"].decode()
    assert "To see the images, add the data set" in alone and 'alt="image' not in alone
    assert "Likely wrong labels" not in made.make("pets")["report.html"].decode()
