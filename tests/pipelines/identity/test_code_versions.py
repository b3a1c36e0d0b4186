"""Whoever changes a stage's code says whether its results change: see tests/scripts/accept_code.py."""

import json

import pytest

from pipelines.identity import code_digest
from pipelines.spec import STAGE_TYPES
from tests.support.paths import TESTS

RECORD = json.loads((TESTS / "code_versions.json").read_text())


@pytest.mark.parametrize("job", STAGE_TYPES)
def test_a_change_of_code_was_judged(job: str) -> None:
    assert len(RECORD[job].get("same_result", "a new version").split()) >= 3
    assert RECORD[job]["version"] == STAGE_TYPES[job].VERSION, "make accept-code"
    assert RECORD[job]["digest"] == code_digest(job), (
        f"the code that {job} imports has changed. If its results change, raise {STAGE_TYPES[job].__name__}.VERSION in "
        'pipelines/spec/stages/ and `make accept-code`; if they do not, `make accept-code WHY="..."`'
    )
