"""Test images that were in training: found along the lineage, refused, or scored apart without a verdict."""

import json
import re
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipelines import store as st
from pipelines.machine.export import write_files
from pipelines.results.accuracies import list_results
from pipelines.spec import Baselines, Evaluate, Import, Labels
from pipelines.store import Manifest, Store, StoreDamaged, input_ref, open_store
from ray_jobs import baselines, evaluate, finetune
from ray_jobs.data import shards
from ray_jobs.evaluation import leakage, rows
from ray_jobs.import_model import import_model
from ray_jobs.process.context import Context
from ray_jobs.reporting import provenance
from ray_jobs.training.evaluators import score
from ray_jobs.training.task import make_task
from tests.support import datasets
from tests.support.checkpoints import put_untrained
from tests.support.finetuning import configuration, refitted
from tests.support.records import flip, make_attempt, make_context, make_manifest
from tests.support.reports import make_report
from tests.support.s3 import Server, used
from vit_model.weights import load_model

FEW = Labels(per_class=4, draws=3, folds=2, seed=5)
Numbers = Sequence[int]


class Made:
    """A store with data sets of numbered pictures, of two classes, and models of them."""

    def __init__(self, folder: Path) -> None:
        self.store: Store = open_store(str(folder))
        self.artifacts: dict[str, Manifest] = {}

    def data(
        self,
        name: str,
        train: Numbers,
        dev: Numbers = (),
        test: Numbers = (),
        lacks: Sequence[str] = (),
        pushed: Mapping[int, int] | None = None,
    ) -> Manifest:
        """A data set of these images; without some columns of its index, as if an earlier version had made it.

        `pushed`: images that were left out, each because of a test image, whatever their hashes.
        """
        splits = {"train": train, "dev": dev, "test": test}
        with self.store.staging(st.Layout.files("ingest", name, 1)) as staging:
            info = datasets.put_numbered(staging.path, name, ("even", "odd"), splits)
            index = staging.path / "index.parquet"
            pq.write_table(pq.read_table(index).drop(list(lacks)), index)
            if pushed is not None:
                _put_copies(staging.path, name, pushed)
        return self._commit(name, "ingest", content_digest=info.content_digest, files=staging.files)

    def model(
        self,
        name: str,
        job: str,
        data: str = "",
        backbone: str = "",
        says: str = "unknown",
        init_from: str = "",
        teacher: str = "",
        **config: Any,
    ) -> Manifest:
        """An untrained model that says it was made of these; without data, weights that were imported."""
        images = self.artifacts[data or next(iter(self.artifacts))]
        seed = zlib.crc32(name.encode())  # equal weights are one model
        files = put_untrained(self.store, images, name, job, seed=seed, training_data=says).files
        given = {"data": data, "backbone": backbone, "init_from": init_from, "teacher": teacher}
        inputs = {field: [input_ref(self.store, self.artifacts[one])] for field, one in given.items() if one}
        return self._commit(name, job, content_digest=name, files=files, inputs=inputs, config=config)

    def _commit(self, name: str, job: str, **fields: Any) -> Manifest:
        self.artifacts[name] = st.commit(self.store, make_manifest(job, key=name, stage=name, **fields))
        return self.artifacts[name]

    def folder(self, name: str) -> Path:
        return st.local_files(self.store, self.artifacts[name])

    def context(self, config: Any, key: str = "k") -> Context:
        given = {field: (self.artifacts[name],) for field, (name,) in config.inputs().items()}
        attempt = make_attempt(
            config.job,
            key=key,
            store_id=self.store.id,
            store_uri=self.store.uri,
            config=config.model_dump(mode="json"),
        )
        return Context(attempt, config, given)

    def check(self, data: str, backbone: str, **fields: Any) -> leakage.Overlap:
        """What an evaluation that learns from all of train and dev would be told."""
        context = self.context(few_shot(data, backbone, **fields))
        dataset = context.dataset()
        labelled = pa.concat_tables([dataset.index(split) for split in ("train", "dev")])
        return leakage.check_leakage(context, dataset, labelled)


def _put_copies(folder: Path, name: str, pushed: Mapping[int, int]) -> None:
    """The tables of ingest about images that were left out because of test images."""
    copies = [
        {"key": str(one), "twin": f"{name}-test-{twin:04d}", "twin_split": "test", "twin_dataset": name}
        for one, twin in pushed.items()
    ]
    pq.write_table(
        pa.Table.from_pylist([copy | {"done": "left out"} for copy in copies]), folder / "duplicates.parquet"
    )
    train = [datasets.raw(str(one), datasets.NUMBERED[one], 0) for one in pushed]
    shape = shards.ImageSize(height=8, width=8, channels=1)
    datasets.put(folder / "x", "x", ("even", "odd"), shape, {"train": train})
    (folder / "facts").mkdir()
    shutil.move(folder / "x" / "index.parquet", folder / "facts" / "00-00000.parquet")
    shutil.rmtree(folder / "x")


def few_shot(data: str, backbone: str, **fields: Any) -> Evaluate:
    base = {"job": "evaluate", "data": data, "backbone": backbone, "shots": (2,), "draws": 2}
    return Evaluate.model_validate(base | fields)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """`a` and `b` hold the same hundred pictures in other splits: 20 test images of b are in train or dev of a."""
    found = Made(tmp_path / "store")
    found.data("a", train=range(60), dev=range(60, 70), test=range(70, 100))
    found.data("b", train=range(40, 100), dev=range(30, 40), test=range(10, 30))
    found.model("tuned", "finetune", data="a", labels={})
    return found


# ------------------------------------------------------------------------------------------------- what was seen


def test_overlap_is_that_of_sets() -> None:
    """Against sets written out, on images with colliding ids and hashes a bit apart; what is flat is near nothing."""
    rng = np.random.default_rng(1)
    flat, base = 0, int(rng.integers(2**63))
    test, own, labelled, *trainings = rng.integers(0, 160, (5, 40)).tolist()
    own += labelled
    almost_flat = min({*test} - {*own, *trainings[0], *trainings[1]})

    def images(ids: Numbers) -> pa.Table:
        hashes = [flat if one % 7 == 0 else base ^ (1 << one % 60) * (one % 3) ^ (one // 40) * 0xFFF0 for one in ids]
        hashes = [3 if one == almost_flat else phash for one, phash in zip(ids, hashes, strict=True)]
        return pa.table({"content_id": [str(one) for one in ids], "phash": pa.array(hashes, pa.uint64())})

    found = leakage.find_overlap(*map(images, (test, own, labelled)), [images(one) for one in trainings])
    earlier = {*trainings[0], *trainings[1]}
    hashes = dict(zip(map(str, range(160)), images(range(160))["phash"].to_pylist(), strict=True))

    def is_near(one: int) -> bool:
        others = {hashes[str(other)] for other in {*earlier, *labelled}} - {flat}
        return hashes[str(one)] != flat and min((hashes[str(one)] ^ other).bit_count() for other in others) <= 4

    assert found.seen.tolist() == [one in earlier and one not in own for one in test]
    assert found.also_in_train == sum(one in own and one in {*earlier, *labelled} for one in test)
    assert found.near_copies == sum(is_near(one) and one not in {*earlier, *labelled} for one in test)
    assert found.labels_seen == sum(one in earlier for one in labelled)
    assert 0 < found.near_copies < len(test) and found.seen.any() and found.also_in_train


@pytest.mark.parametrize("labels", [FEW, Labels(), Labels(use_dev=False)])
def test_a_fine_tuning_was_trained_on_what_it_was_given(made: Made, labels: Labels) -> None:
    """The first draw's pool of the stage itself, which the stored model is fitted on."""
    config = configuration(data="a", labels=labels, learning_rates=(1e-3,), steps=1, batch_size=1)
    pools, *_ = finetune.labelled(config, shards.open_dataset(made.folder("a")))
    tuned = made.model("few", "finetune", data="a", labels=labels.model_dump())
    (training,), unknown, _ = leakage.read_trainings(made.store, [tuned])
    assert not unknown
    assert training.images["content_id"].to_pylist() == pools[0].rows["content_id"].to_pylist()


def test_a_pretraining_was_trained_on_train_alone(made: Made) -> None:
    made.model("pretrained", "pretrain", data="a")
    made.data("c", train=range(150, 160), test=range(55, 65))
    with pytest.raises(ValueError, match=r"trained on 5 of the 10 test images of c"):
        made.check("c", "pretrained")


def test_every_ancestor_counts_and_the_message_says_which(made: Made) -> None:
    made.data("c", train=range(100, 120))
    made.model("again", "finetune", data="c", backbone="tuned", labels={})
    with pytest.raises(ValueError) as error:
        made.check("b", "again")
    assert "backbone again: trained on 20 of the 20 test images of b" in str(error.value)
    assert "20 by tuned (finetune tuned) on a (ingest a)" in str(error.value)
    assert "on c" not in str(error.value)
    assert "`against: [b]`" in str(error.value)


@pytest.mark.parametrize("tuned_since", [False, True])
def test_a_pretraining_was_trained_on_what_its_start_was(made: Made, tuned_since: bool) -> None:
    """Over several generations: the first has seen test images of c, the last was continued on others."""
    made.data("c", train=range(100, 120), test=range(55, 65))
    made.data("d", train=range(120, 140))
    made.model("first", "pretrain", data="a")
    made.model("second", "pretrain", data="d", init_from="first")
    made.model("third", "pretrain", data="c", init_from="second")
    if tuned_since:
        made.model("tuned_third", "finetune", data="d", backbone="third", labels={})
    with pytest.raises(ValueError, match=r"5 of the 10 test images of c .*by first .* on a"):
        made.check("c", "tuned_third" if tuned_since else "third")
    made.model("weights", "import")
    made.model("continued", "pretrain", data="d", init_from="weights")
    assert made.check("c", "continued").unknown == ("weights (import weights)",)


def test_a_student_was_trained_on_what_its_teacher_was(made: Made) -> None:
    made.data("c", train=range(100, 120), test=range(55, 65))
    made.model("wise", "pretrain", data="a")
    made.model("student", "pretrain", data="c", teacher="wise")
    made.model("tuned_student", "finetune", data="c", backbone="student", labels={})
    for model in ("student", "tuned_student"):
        with pytest.raises(ValueError, match=r"5 of the 10 test images of c .*by wise .* on a"):
            made.check("c", model)


def test_images_that_the_authors_have_in_train_and_test_are_only_counted(made: Made) -> None:
    """One of them in dev: the model saw what training on this very data set would have shown it."""
    made.data("official", train=range(100, 120), dev=(3, 121), test=(3, 105, 130, 131))
    found = made.check("official", "tuned")
    assert (found.also_in_train, found.seen.any()) == (2, False)


def test_copies_that_were_dropped_after_the_training_were_seen(made: Made) -> None:
    """The authors have 12 of their test images in train, too. The second data set is ingested without these copies."""
    made.data("kept", train=range(100, 160), test=range(148, 180))
    made.data("dropped", train=range(100, 148), test=range(148, 180))
    made.model("on_kept", "finetune", data="kept", labels={})
    with pytest.raises(ValueError, match="trained on 12 of the 32 test images of dropped"):
        made.check("dropped", "on_kept")


def test_copies_that_left_train_because_of_a_new_test_image_were_seen(made: Made) -> None:
    """Ingest left out 100, a near-copy of 148, and 101, a mirrored copy of 149; an ancestor had them in train."""
    made.data("before", train=range(100, 148))
    made.model("first", "pretrain", data="before")
    made.data("after", train=range(102, 148), test=range(148, 180), pushed={100: 148, 101: 149, 190: 150})
    found = made.check("after", "first")
    keys = shards.open_dataset(made.folder("after")).index("test")["key"].to_pylist()
    assert {keys[row] for row in np.flatnonzero(found.seen)} == {"after-test-0148", "after-test-0149"}
    assert found.metrics["test_images_seen_in_training"] == 2, "not refused, but scored apart"
    made.model("of_another_set", "pretrain", data="a")
    assert not made.check("after", "of_another_set").seen.any()


def test_unknown_training_images_are_reported(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    """Imported weights; a data set whose index, or manifest, is gone, or that has another content now."""
    made.model("weights", "import")
    root = Path(made.store.uri) / "artifacts"
    made.model("on_imported", "finetune", data="a", backbone="weights", labels={})
    for name, path in (("no_index", "attempts/1/files/index.parquet"), ("no_manifest", "manifest.json")):
        made.data(name, train=range(10, 20))
        made.model(f"of_{name}", "pretrain", data=name)
        (root / "ingest" / name / path).unlink()
    made.data("made_again", train=range(10, 20))
    made.data("old_index", train=range(10, 20), lacks=["content_id"])
    for name in ("old_index", "made_again"):
        made.model(f"of_{name}", "pretrain", data=name)
    (root / "ingest" / "made_again" / "manifest.json").unlink()
    made.data("made_again", train=range(110, 120))
    made.data("fresh", train=range(150, 170), test=range(170, 180))
    for name in ("weights", "of_no_index", "of_no_manifest", "of_old_index", "of_made_again"):
        capsys.readouterr()
        found = made.check("fresh", name)
        assert len(found.unknown) == 1 and found.unknown[0].startswith(name)
        assert name in str(found.metrics["unknown_training"]) and name in capsys.readouterr().out
    assert made.check("fresh", "on_imported").unknown == ("weights (import weights)",)
    assert "unknown_training" not in made.check("fresh", "tuned").metrics


def test_a_damaged_data_set_of_an_ancestor_is_healed_by_making_it_again(made: Made) -> None:
    """As `run --force` does it: the model's manifest goes on naming the artifact that was damaged."""
    first = made.artifacts["a"]
    root = Path(made.store.uri) / "artifacts" / "ingest"
    shutil.copytree(root / "a" / "attempts", root / "again" / "attempts")
    flip(root / "a" / "attempts" / "1" / "files" / "index.parquet")
    with pytest.raises(StoreDamaged):
        made.check("b", "tuned", seen_in_training="report")
    st.commit(made.store, first.model_copy(update={"key": "again"}))
    st.replace_artifact(made.store, "ingest", "a", "again", "run", "it was damaged")
    assert made.check("b", "tuned", seen_in_training="report").seen.sum() == 20


def test_on_s3_only_the_index_of_a_data_set_and_the_contract_of_a_model_are_fetched(
    made: Made, tmp_path: Path, moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with used(moto, monkeypatch) as server:
        remote = open_store(f"s3://{server.bucket().name}")
        with remote.staging("artifacts") as staging:
            shutil.copytree(Path(made.store.uri) / "artifacts", staging.path, dirs_exist_ok=True)
        (training,), *_ = leakage.read_trainings(remote, [made.artifacts["tuned"]])
    assert len(training.images) == 70
    fetched = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.stat().st_size]
    read = [made.folder("a") / "index.parquet", made.folder("tuned") / "config.json"]
    assert sorted(path.read_bytes() for path in fetched) == sorted(path.read_bytes() for path in read)


# ------------------------------------------------------------------------------------------------- what becomes of it


def test_an_evaluation_on_images_of_the_training_is_refused(made: Made) -> None:
    """One folder, two splits of it: the number that came out of this was too good by 20 points."""
    with pytest.raises(ValueError, match=r"20 of the 20 test images of b .*seen_in_training: report"):
        evaluate.evaluate(made.context(few_shot("b", "tuned")))
    assert not made.store.names("artifacts/evaluate"), "nothing was computed"


@pytest.fixture
def scored(made: Made) -> Made:
    """`scored` is of the data set `half`, whose first ten test images of twenty were in dev of a."""
    made.data("half", train=range(100, 140), test=range(60, 80))
    config = few_shot("half", "tuned", seen_in_training="report")
    result = evaluate.evaluate(made.context(config, key="scored"))
    inputs = {field: [input_ref(made.store, made.artifacts[name])] for field, (name,) in config.inputs().items()}
    machine = {"python": "3.11", "machine": "x86_64", "processor": "A", "cluster": {}, "packages": {}}
    made._commit(
        "scored",
        "evaluate",
        files=result.files,
        config=config.model_dump(mode="json"),
        inputs=inputs,
        metrics=result.metrics,
        environment=machine,
        code={"version": 1, "digest": "c"},
    )
    return made


ON_SEEN, ON_UNSEEN = (f"ViT, pretrained, on test images {what} in training" for what in ("seen", "not seen"))


def test_where_asked_for_they_are_scored_apart(scored: Made) -> None:
    assert scored.artifacts["scored"].metrics["test_images_seen_in_training"] == 10
    numbers = pq.read_table(scored.folder("scored") / "rows.parquet").to_pylist()
    images = {row["method"]: row["num_images"] for row in numbers}
    assert images == {
        ON_SEEN: 10,
        ON_UNSEEN: 10,
        "ViT, untrained": 20,
        "pixels": 20,
        "pixels, standardised": 20,
        "most frequent class": 20,
    }
    right: dict[str, dict[str, bool]] = {method: {} for method in images}
    for row in pq.read_table(scored.folder("scored") / "predictions.parquet").to_pylist():
        if row["draw"] == 0:
            right[row["method"]][row["sample_id"]] = row["correct"]
    assert set(right[ON_SEEN]) == {f"half-test-{number:04d}" for number in range(60, 70)}
    assert right[ON_SEEN].keys() | right[ON_UNSEEN].keys() == right["pixels"].keys()
    for row in numbers:
        if row["draw"] == 0:
            assert row["value"] == np.mean(list(right[row["method"]].values()))


def test_no_verdict_and_no_list_of_the_best_has_a_row_of_a_part_of_test(scored: Made) -> None:
    numbers, page = made_report(scored, "scored")
    assert numbers["verdicts"] == [] and numbers["headline"].startswith("Nothing to compare")
    said = {line["method"]: line["seen"] for line in numbers["accuracies"]}
    assert said[ON_SEEN] == said[ON_UNSEEN] == "seen in training: 10 test images" and not said["pixels"]
    assert page.count("seen in training: 10 test images") == 2
    (best,) = re.findall(r'<tr class="best"><td>([^<]*)<', page)
    assert best in images_scored_whole(numbers)
    listed = {row["method"] for row in list_results(scored.store, None, None, "accuracy")}
    assert listed and listed <= images_scored_whole(numbers)


def made_report(made: Made, of: str) -> tuple[dict[str, Any], str]:
    """The numbers and the page of a report of one artifact."""
    files = make_report(made.store, [made.artifacts[of]])
    return json.loads(files["report.json"]), files["report.html"].decode()


def test_of_parts_of_test_alone_none_is_the_best(scored: Made) -> None:
    """As of a fine-tuning without baselines."""
    with scored.store.staging(st.Layout.files("evaluate", "parts", 1)) as staging:
        for name, schema in (("rows", rows.ROWS), ("predictions", rows.PREDICTIONS)):
            table = pq.read_table(scored.folder("scored") / f"{name}.parquet").to_pylist()
            apart = [row for row in table if rows.is_apart(row["method"])]
            rows.write_table(staging.path / f"{name}.parquet", apart, schema)
    changed = {"key": "parts", "stage": "parts", "files": staging.files}
    manifest = scored.artifacts["scored"].model_copy(update=changed)
    scored.artifacts["parts"] = st.commit(scored.store, manifest)
    numbers, page = made_report(scored, "parts")
    assert len(numbers["accuracies"]) == 2 and 'class="best"' not in page


def images_scored_whole(numbers: dict[str, Any]) -> set[str]:
    """The methods whose rows are of all of test."""
    return {line["method"] for line in numbers["accuracies"] if line["num_images"] == 20}


@pytest.mark.parametrize(
    ("overlap", "said"),
    [
        ((0, 0, 0), "none"),
        ((0, 3, 1234), "none, 3 also in its own train or dev, 1,234 near-copies"),
        ((0, 0, 2, ("weights",)), "unknown, 2 near-copies"),
    ],
)
def test_the_page_says_what_each_training_had_of_test(overlap: tuple[Any, ...], said: str) -> None:
    seen, shared, near, *unknown = overlap
    metrics = leakage.Overlap(np.arange(9) < seen, shared, near, 0, *unknown).metrics
    assert provenance.seen_in_training(metrics) == f"seen in training: {said}"


def test_a_backbone_that_learned_from_the_labelled_images_is_named_so(made: Made) -> None:
    """Whatever the digest of its data set: `twin` has the pictures of a in the same splits, but for one."""
    made.data("twin", train=range(59), dev=range(60, 70), test=range(70, 100))
    dataset = shards.open_dataset(made.folder("twin"))
    assert dataset.info.content_digest != made.artifacts["a"].content_digest
    result = evaluate.evaluate(made.context(few_shot("twin", "tuned")))
    assert "ViT, trained on these images @ 2" in result.metrics
    assert "ViT, pretrained @ 2" not in result.metrics
    for labels, name in ((FEW, "ViT, trained on these images"), (Labels(), "ViT, pretrained")):
        fields = {"data": "twin", "backbone": "tuned", "model": None, "resolution": None, "labels": labels}
        config = configuration(**fields, learning_rates=(1e-3,), steps=1, batch_size=1)
        context = made.context(config)
        pools, *_ = finetune.labelled(config, dataset)
        overlap = leakage.check_leakage(context, dataset, pools[0].rows)
        task = make_task(config, dataset, made.folder("tuned"))
        refits = [refitted(score(torch.zeros(30, 2), dataset.labels("test")))]
        numbers, *_ = finetune.tables(task, dataset, refits, "dev", overlap)
        assert [row["method"] for row in numbers] == [name]


def imported_again(made: Made, name: str, to: str, tmp_path: Path) -> Manifest:
    """A model of the store, exported and imported as the commands do it."""
    path = tmp_path / to
    path.mkdir()
    if to == "vitflow":
        for file in ("model.safetensors", "config.json"):
            shutil.copy(made.folder(name) / file, path)
    else:
        list(write_files(to, path, *load_model(made.folder(name))))  # type: ignore[arg-type]
    path = path / "model.npz" if to == "npz" else path
    half = None if to == "vitflow" else "half"
    context = make_context(
        made.store, Import.model_validate({"job": "import", "path": str(path), "preprocessing": half})
    )
    result = import_model(context)
    (made.store.root / "artifacts/import/k").rename(made.store.root / "artifacts/import" / to)
    return made._commit(to, "import", content_digest=result.content_digest, files=result.files)


@pytest.mark.parametrize("to", ["vitflow", "hf", "timm", "npz"])
def test_our_own_weights_keep_their_lineage_when_they_are_exported_and_imported(
    made: Made, tmp_path: Path, to: str
) -> None:
    """Once: "test images seen in training: 0 of 20" for all 20."""
    made.data("c", train=range(100, 120))
    made.model("again", "finetune", data="c", backbone="tuned", labels={})
    imported_again(made, "again", to, tmp_path)
    with pytest.raises(ValueError, match=r"20 of the 20 test images of b .*by tuned .* on a"):
        made.check("b", to)
    found = made.check("b", to, seen_in_training="report")
    assert found.seen.all() and not found.unknown
    made.data("fresh", train=range(150, 170), test=range(170, 180))
    made.model("further", "finetune", data="fresh", backbone=to, labels={})
    assert made.check("b", "further", seen_in_training="report").seen.all(), "as an ancestor, too"


def test_of_weights_from_elsewhere_the_data_set_that_they_name_is_known(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    """The store has not the model, but its data set: test images of b are in train or dev of it."""
    made.model("weights", "import", says=made.artifacts["a"].content_digest)
    made.data("c", train=range(100, 120), test=range(130, 140))
    made.model("continued", "pretrain", data="c", init_from="weights")
    for name in ("weights", "continued"):
        assert made.check("a", name).labels_seen == 70
        found = made.check("b", name, seen_in_training="report")
        assert (found.seen.sum(), found.unknown) == (20, ("ancestors of weights (import weights)",))
        assert "seen in training: at least 20 of 20" in capsys.readouterr().out
        with pytest.raises(ValueError, match="trained on 20 of the 20 test images of b"):
            made.check("b", name)
    made.check("c", "weights")
    assert "test images seen in training: unknown" in capsys.readouterr().out


def test_a_fine_tuned_model_is_listed_with_its_accuracy_on_images_it_has_not_seen(made: Made) -> None:
    dataset = shards.open_dataset(made.folder("a"))
    labels = dataset.labels("test")
    seen = np.arange(30) < 10
    right_on_seen = np.where(seen, labels, 1 - labels)
    common = {"protocol": "p", "method": "m", "labels_per_class": None, "draw": 0}

    def accuracy(mask: np.ndarray) -> dict[str, float]:
        scored = rows.scored(common, rows.truth_of(dataset, mask), right_on_seen, "dev", {})
        return finetune._on_test([row for row, _ in scored], "accuracy")

    assert accuracy(~seen | seen) == {}
    assert accuracy(seen) == {"test_accuracy": 0.0}
    assert accuracy(~seen) == {"test_accuracy": 1.0}


def test_baselines_count_what_the_authors_splits_share(made: Made) -> None:
    """They have no backbone, so nothing is refused."""
    made.data("official", train=range(20), dev=(121,), test=(3, 105, 130, 131))
    config = Baselines(job="baselines", data="official", methods=("majority",))
    context = made.context(config)
    dataset = context.dataset()
    supports = baselines._supports(dataset, config)
    found = leakage.check_leakage(context, dataset, supports.pool.take(supports.rows))
    assert (found.also_in_train, found.seen.any(), found.unknown) == (1, False, ())
