"""docs/threats.md: each way in names a test that exists."""

import re

from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "threats.md"


def test_each_threat_names_tests_that_exist() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|")][2:]
    threats = [row for row in rows if not row.startswith("| **")]
    assert threats
    for row in threats:
        tests = re.findall(r"\[(test_\w+)\]\(\.\./(tests/[\w/]+\.py)\)", row)
        assert tests, row
        for name, file in tests:
            assert f"\ndef {name}(" in (ROOT / file).read_text(), f"{file} has no {name}"
