"""What a run ends with: the rows that answer the recipe's question, the answer, the next commands."""

import re
import shlex
from pathlib import Path

import pytest

from pipelines.commands import queries
from tests.conftest import Vitflow
from tests.support.documented import prepare


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the store that the quickstart leaves."""
    folder = tmp_path_factory.mktemp("ending")
    prepare(folder)
    return folder


def test_the_quickstart_ends_with_an_answer_on_one_screen(
    vitflow_here: Vitflow, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace)
    said = vitflow_here("run", "quickstart").stdout
    rows = re.findall(r"^  .+ \d+\.\d–\d+\.\d .+$", said, re.MULTILINE)
    assert 3 <= len(rows) <= 10 and "majority" not in said
    assert len(re.findall(r"^\d+ more accuracies: vitflow report show \w{12}$", said, re.MULTILINE)) == 1
    assert f"\nreport: file://{workspace}/runs/artifacts/report/" in said
    *others, split = said.partition("next:\n  vitflow ")[2].split("\n  vitflow ")
    assert others == [
        "predict quickstart/finetune_all IMAGE...",
        "export quickstart/finetune_all --format onnx --output FOLDER",
    ]
    rows = vitflow_here(*shlex.split(split, comments=True)).stdout.splitlines()
    assert {row.partition(",")[2] for row in rows} == {"split", "train", "dev", "test"} and len(rows) == 1 + 1797
    monkeypatch.chdir("/")
    said = vitflow_here("run", "quickstart", "--store", workspace / "runs").stdout
    assert f"IMAGE... --store {workspace}/runs\n" in said
    monkeypatch.setattr(queries, "MOST_LINES", 2)
    said = vitflow_here("report", "show", "--store", workspace / "runs").stdout
    assert re.search(r"^\d+ more accuracies on the report's page$", said, re.MULTILINE)


def test_without_a_report_the_best_result_has_an_interval_and_a_protocol(
    vitflow_here: Vitflow, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace)
    said = vitflow_here("run", "quickstart", "--only", "finetune_all").stdout
    assert re.search(
        r"^digits: 8\d\.\d% \(95% CI \d\d\.\d to \d\d\.\d\), ViT, pretrained \(fine-tuning, all labels, \d+ test"
        r" images, stage finetune_all\)$",
        said,
        re.MULTILINE,
    )
    said = vitflow_here("run", "quickstart", "--only", "pixels_all").stdout
    assert "digits: the best of 3 results on test is " in said and "next:" not in said
