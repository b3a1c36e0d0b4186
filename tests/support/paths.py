"""Where the checkout's files are."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
TINY = TESTS / "tiny.yaml"
"""A recipe of all stages that runs in a minute on two cores."""
SHARED = ROOT.parent / "shared"
"""Large or licensed test data beside the checkout; a test that needs it skips where it is absent."""
