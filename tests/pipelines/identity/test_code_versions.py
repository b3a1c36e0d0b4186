"""Whoever changes a stage's code says whether its results change: see tests/scripts/accept_code.py."""

import json
from pathlib import Path

import pytest

from pipelines.spec import STAGE_TYPES
from tests.scripts import accept_code

RECORD = json.loads(accept_code.RECORD.read_text())


@pytest.mark.parametrize("job", STAGE_TYPES)
def test_a_change_of_code_was_judged(job: str) -> None:
    assert len(RECORD[job].get("same_result", "a new version").split()) >= 3
    assert RECORD[job]["version"] == STAGE_TYPES[job].VERSION, "make accept-code"
    assert RECORD[job]["digest"] == accept_code.digest(job), (
        f"the code that {job} imports has changed. If its results change, raise {STAGE_TYPES[job].__name__}.VERSION in "
        'pipelines/spec/stages/ and `make accept-code`; if they do not, `make accept-code WHY="..."`'
    )


def test_a_move_needs_no_judgement_and_a_change_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def says(text: str) -> str:
        (tmp_path / "module.py").write_text(text)
        accept_code._says.cache_clear()
        return accept_code._says("module.py")

    monkeypatch.setattr(accept_code, "PROJECT", tmp_path)
    before = says("from ray_jobs.data.crops import crop\nimport torch\n\ndef f(x):\n    return crop(x)\n")
    assert says("from ray_jobs.augment.crops import crop\nimport torch\n\ndef f(x):\n    return crop(x)\n") == before
    assert says("from ray_jobs.data.crops import crop\nimport torch\n\ndef f(x):\n    return x\n") != before
