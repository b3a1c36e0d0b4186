"""VTAB-1k's table in a report, from real evaluations of small datasets that stand in for four of its tasks."""

import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from pipelines import store as st
from pipelines.results.accuracies import verdict_lines, vtab_table
from pipelines.results.sql.query import query
from pipelines.spec import Evaluate
from pipelines.spec.vtab import GROUPS, TASKS
from pipelines.store import Manifest, Store, input_ref, open_store
from ray_jobs import evaluate
from ray_jobs.process.context import Context
from ray_jobs.reporting import page as page_module
from ray_jobs.reporting import vtab
from ray_jobs.reporting.gather import ReportData
from tests.support.checkpoints import put_untrained
from tests.support.digits import put_digits
from tests.support.records import make_attempt, make_manifest
from tests.support.reports import make_report
from tests.support.scores import make_entry

NOTES = {"svhn": ("membership <checked>",), "eurosat": (), "kitti": (), "dmlab": ("raw pixels",)}
OTHERS = [files.title for task, files in TASKS.items() if task not in NOTES]
METHODS = {"ViT, pretrained", "ViT, untrained", "pixels", "pixels, standardised", "most frequent class"}


class Vtab:
    """A store with a backbone, and for each task that is asked for a dataset and its evaluation."""

    def __init__(self, folder: Path) -> None:
        self.store: Store = open_store(str(folder))
        self.made: dict[str, Manifest] = {}

    def commit(self, stage: str, job: str, files: Any, **fields: Any) -> Manifest:
        machine = {"python": "3.11", "machine": "x86_64", "processor": "A", "cluster": {}, "packages": {}}
        made = {"code": {"version": 1, "digest": "c" * 64}, "environment": machine, "content_digest": stage}
        manifest = make_manifest(job, key=self.key(stage), stage=stage, files=files, **made, **fields)
        self.made[stage] = st.commit(self.store, manifest)
        return self.made[stage]

    def key(self, stage: str) -> str:
        return f"{stage.encode().hex():0<64}"[:64]

    def refs(self, *stages: str) -> list[st.InputRef]:
        return [input_ref(self.store, self.made[stage]) for stage in stages]

    def task(self, task: str, start: int, test: int) -> None:
        """Digits from number `start` on, with so many test images."""
        cuts = {"train": (0, 40), "dev": (40, 50), "test": (50, 50 + test)}
        parts = {split: range(start + first, start + last) for split, (first, last) in cuts.items()}
        stage, name = f"images@task={task}", TASKS[task].title  # type: ignore[index]
        with self.store.staging(st.Layout.files("ingest", self.key(stage), 1)) as staging:
            put_digits(staging.path, name, parts, NOTES[task])
            pq.write_table(pq.read_table(staging.path / "index.parquet")[:0], staging.path / "quarantine.parquet")
        source = {"kind": "vtab", "task": task, "root": f"/some/{task}", "pixels": "published"}
        data = self.commit(stage, "ingest", staging.files, config={"source": source})
        if "backbone" not in self.made:
            key = self.key("backbone")
            model = put_untrained(self.store, data, key, "import", training_data="others")
            self.commit("backbone", "import", model.files, config={"path": "x"})

    def evaluate(self, stage: str, task: str, **fields: Any) -> None:
        asked = {"shots": (1, 5), "draws": 2, "support": "train+dev", "linear_probe": True} | fields
        config = Evaluate.model_validate({"job": "evaluate", "data": "d", "backbone": "m"} | asked)
        name = f"{stage}@task={task}"
        inputs = {"data": self.refs(f"images@task={task}"), "backbone": self.refs("backbone")}
        attempt = make_attempt(
            "evaluate",
            key=self.key(name),
            store_id=self.store.id,
            store_uri=self.store.uri,
            config=config.model_dump(mode="json"),
            inputs=inputs,
        )
        manifests = {"data": (self.made[f"images@task={task}"],), "backbone": (self.made["backbone"],)}
        result = evaluate.evaluate(Context(attempt, config, manifests))
        self.commit(name, "evaluate", result.files, config=attempt.config, inputs=inputs)

    def report(self, stages: Sequence[str], missing: tuple[str, ...] = ()) -> tuple[dict[str, Any], str]:
        """report.json and the page of a report of these stages."""
        files = make_report(self.store, [self.made[stage] for stage in stages], "VTAB", missing=missing)
        return json.loads(files["report.json"]), files["report.html"].decode()

    def values(self, stage: str, method: str, labels: int | None, classifier: str = "linear") -> float:
        """The mean over draws, straight from an evaluation's rows."""
        folder = st.local_files(self.store, self.made[stage])
        return float(
            np.mean(
                [
                    row["value"]
                    for row in pq.read_table(folder / "rows.parquet").to_pylist()
                    if (row["method"], row["labels_per_class"]) == (method, labels) and classifier in row["protocol"]
                ]
            )
        )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Vtab:
    vtab = Vtab(tmp_path_factory.mktemp("vtab") / "store")
    for number, (task, test) in enumerate({"svhn": 20, "eurosat": 30, "kitti": 60, "dmlab": 40}.items()):
        vtab.task(task, 150 * number, test)
        vtab.evaluate("few_shot", task)
    return vtab


@pytest.fixture(scope="module")
def whole(made: Vtab) -> tuple[dict[str, Any], str]:
    missing = ("images@task=dtd", "few_shot@task=dtd")
    return made.report(list(made.made), missing)


@pytest.mark.slow
def test_every_number_is_the_plain_mean_over_tasks(made: Vtab, whole: tuple[dict[str, Any], str]) -> None:
    scores = {score["method"]: score for score in whole[0]["vtab"]}
    assert scores.keys() == METHODS
    for method, score in scores.items():
        assert [column["labels"] for column in score["columns"]] == ["1 shot", "5 shots", "all 50"]
        for number, labels in enumerate((1, 5, None)):
            expected = {task: made.values(f"few_shot@task={task}", method, labels) for task in NOTES}
            found = {line["task"]: line["accuracies"][number] for line in score["tasks"] if not line["missing"]}
            assert found == pytest.approx(expected)
            column = score["columns"][number]
            assert column["mean"] == pytest.approx(np.mean(list(expected.values())))
            assert column["tasks"] == 4
            groups = {"natural": ["svhn"], "specialized": ["eurosat"], "structured": ["kitti", "dmlab"]}
            for name, tasks in groups.items():
                mean = np.mean([expected[task] for task in tasks])
                assert column["groups"][name] == {"mean": pytest.approx(mean), "tasks": len(tasks)}
    assert next(iter(scores)) == "ViT, pretrained"
    assert (scores["ViT, pretrained"]["trained"], scores["pixels"]["trained"]) == (True, False)


def test_what_is_missing_is_said_wherever_the_score_stands(whole: tuple[dict[str, Any], str]) -> None:
    numbers, page = whole
    score = numbers["vtab"][0]
    assert (score["covered"], score["missing"]) == (4, OTHERS)
    assert [line["task"] for line in score["tasks"]] == list(TASKS), "all 19, in VTAB's order"
    mean = f"{100 * score['columns'][0]['mean']:.1f}%"
    assert score["sentence"].startswith(
        f"VTAB-1k, ViT, pretrained (backbone), mean over 4 of the 19 tasks: {mean} with 1 shot, "
    )
    assert score["sentence"].endswith(f" with all 50; missing: {', '.join(OTHERS)}.")
    assert verdict_lines(numbers)[0] == score["sentence"]
    assert ">VTAB-1k: 4 of 19 tasks</h2>" in page
    assert "Mean over 4 of 19 tasks" in page
    assert page.count(": missing</td>") == 15
    assert "Not on this page, because they could not be built: images@task=dtd, few_shot@task=dtd." in page
    assert verdict_lines(numbers)[-1].endswith("images@task=dtd, few_shot@task=dtd.")


def test_the_table_for_a_terminal_has_every_number(whole: tuple[dict[str, Any], str]) -> None:
    score = whole[0]["vtab"][0]
    console = Console(width=80, file=io.StringIO())
    console.print(vtab_table(score))
    shown = [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    for line in score["tasks"]:
        cells = ["–"] * 3 if line["missing"] else [f"{100 * value:.1f}" for value in line["accuracies"]]
        assert [*line["title"].split(), *cells] in shown
    means = [f"{100 * column['mean']:.1f}" for column in score["columns"]]
    assert ["mean", "over", "4", "of", "19", "tasks", *means] in shown


def test_notes_on_membership_stand_beside_their_task(whole: tuple[dict[str, Any], str]) -> None:
    lines = {line["task"]: line for line in whole[0]["vtab"][0]["tasks"]}
    assert {task: tuple(lines[task]["notes"]) for task in NOTES} == NOTES
    assert "SVHN<small>membership &lt;checked&gt;</small>" in whole[1]


def test_probes_are_compared_with_probes_of_as_many_labels(whole: tuple[dict[str, Any], str]) -> None:
    verdicts = [verdict for verdict in whole[0]["verdicts"] if verdict["task"] == "SVHN"]
    assert [(v["labels_per_class"], v["protocol"], v["reference_protocol"]) for v in verdicts] == [
        (5, "few-shot linear", "few-shot linear"),
        (5, "few-shot linear", "few-shot linear"),
        (None, "linear probe", "linear probe"),
        (None, "linear probe", "linear probe"),
    ]
    assert [verdict["reference_kind"] for verdict in verdicts] == ["untrained", "pixels"] * 2


@pytest.mark.slow
def test_another_protocol_is_another_score_and_fewer_tasks_are_said(made: Vtab) -> None:
    """Two tasks with one shot only: a score of their own, which the first one is not mixed with."""
    for task in ("svhn", "kitti"):
        made.evaluate("one_shot", task, shots=(1,), linear_probe=False)
    numbers, page = made.report(list(made.made))
    scores = {(score["stage"], score["method"]): score for score in numbers["vtab"]}
    assert len(scores) == 2 * len(METHODS)
    own = scores["one_shot", "ViT, pretrained"]
    assert own["covered"] == 2
    assert [column["mean"] is None for column in own["columns"]] == [False, True, True]
    assert scores["few_shot", "ViT, pretrained"]["covered"] == 4
    assert "VTAB-1k, ViT, pretrained (one_shot of backbone), mean over 2 of the 19 tasks" in own["sentence"]
    assert page.count("</table>") > 3


@pytest.mark.slow
def test_each_classifier_and_each_variant_of_a_task_is_a_score(made: Vtab) -> None:
    """Of one stage with two classifiers per task; a second artifact of a task is in no other's place."""
    tasks = ("svhn", "kitti")
    for task in tasks:
        made.evaluate("two", task, classifiers=["least squares", "nearest class mean"])
    stages = [stage for stage in made.made if stage.startswith(("images", "backbone", "two"))]
    numbers, page = made.report(stages)
    scores = {score["method"]: score for score in numbers["vtab"]}
    own = METHODS - {"most frequent class"}
    assert scores.keys() == METHODS | {f"{method}, nearest class mean" for method in own}
    for method in own:
        for name, classifier in ((method, "linear"), (f"{method}, nearest class mean", "nearest class mean")):
            lines = {line["task"]: line["accuracies"] for line in scores[name]["tasks"]}
            for task in tasks:
                expected = [made.values(f"two@task={task}", method, labels, classifier) for labels in (1, 5, None)]
                assert lines[task] == pytest.approx(expected)
    assert "only a classifier is fitted (linear; nearest class mean)" in page

    first, variant = made.made["two@task=svhn"], "two@task=svhn, variant"
    with made.store.staging(st.Layout.files("evaluate", made.key(variant), 1)) as staging:
        for file in first.files:
            if "/" not in file.path:
                shutil.copy(st.local_files(made.store, first) / file.path, staging.path)
    made.commit(variant, "evaluate", staging.files, config=first.config, inputs=first.inputs)
    numbers, _ = made.report([*stages, variant])
    assert sorted(score["covered"] for score in numbers["vtab"] if score["method"] == "ViT, pretrained") == [
        1,
        2,
    ]


def test_a_report_of_fine_tunings_alone_does_not_speak_of_frozen_features(
    made: Vtab, monkeypatch: pytest.MonkeyPatch
) -> None:
    render = page_module.render

    def render_as_fine_tuned(data: ReportData) -> str:
        for score in data.numbers["vtab"]:
            score["job"] = "finetune"
        return render(data)

    monkeypatch.setattr(page_module, "render", render_as_fine_tuned)
    _, page = made.report([stage for stage in made.made if "one_shot" not in stage])
    assert "Fine-tuned models were trained on train800val200" in page and "Frozen backbones" not in page


def test_all_nineteen_are_no_part(made: Vtab) -> None:
    known = {task: vtab.Evaluated(task, "few_shot", "evaluate", "{}", "backbone", ()) for task in TASKS}
    fields: dict[str, Any] = {"method": "ViT", "protocol": "linear probe", "settings": ('{"labelled_images": 1000}',)}
    entries = [make_entry(np.arange(20)[None] < number, task, **fields) for number, task in enumerate(TASKS)]
    (score,) = vtab.scores(entries, known)
    assert score["missing"] == []
    assert score["columns"][0]["labels"] == "all 1,000"
    assert score["columns"][0]["mean"] == pytest.approx(np.mean([number / 20 for number in range(19)]))
    groups = {name: column["mean"] for name, column in score["columns"][0]["groups"].items()}
    assert np.mean(list(groups.values())) != pytest.approx(score["columns"][0]["mean"]), "19 tasks, not 3 groups"
    assert [column["tasks"] for column in score["columns"][0]["groups"].values()] == [7, 4, 8]
    assert score["sentence"] == "VTAB-1k, ViT (backbone), mean over all 19 tasks: 45.0% with all 1,000."


def test_groups_can_be_asked_for_in_sql(made: Vtab) -> None:
    sql = """SELECT vtab_group, avg(value) FROM rows WHERE method = 'ViT, pretrained' AND protocol = 'linear probe'
             AND stage LIKE 'few_shot%' GROUP BY ALL ORDER BY 1"""
    with query(made.store, sql) as answer:
        found = dict(answer.rows)
    expected: dict[str, list[float]] = {}
    for task in NOTES:
        group = GROUPS[task]  # type: ignore[index]
        expected.setdefault(group, []).append(made.values(f"few_shot@task={task}", "ViT, pretrained", None))
    assert found == {group: pytest.approx(np.mean(values)) for group, values in expected.items()}
