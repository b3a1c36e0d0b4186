"""Random numbers: each use of a seed has a number of its own, and SplitMix64 is its author's."""

import re

import numpy as np

from ray_jobs.randomness import GOLDEN, Purpose, splitmix64
from ray_jobs.sources.readers import glyphs, shapes
from tests.support.paths import ROOT

# from before there was one list; their numbers are part of results
SHARED = {"DRAW_POINTS": "DRAW_LABELS", "PROPOSE_POINT": "SELECT_L2", "CONTACT_SHEET": "SELECT_L2"} | {
    "AUDIT_FOLDS": "DIVIDE_TIES"
}


def test_no_new_purpose_has_the_number_of_another() -> None:
    aliases = {name: purpose.name for name, purpose in Purpose.__members__.items() if name != purpose.name}
    assert aliases == SHARED
    assert (Purpose.GLYPHS, Purpose.SHAPES) == (glyphs._SEED_PURPOSE, shapes._SEED_PURPOSE)


def test_every_use_of_a_seed_names_its_purpose() -> None:
    """Wherever a seed stands beside other numbers."""
    uses = [
        (path.name, found)
        for path in ROOT.glob("ray_jobs/**/*.py")
        for found in re.findall(r"(?:permutation|SeedSequence|default_rng)\(([^\n]*,.*)\)", path.read_text())
        if "seed" in found or found.startswith("[")
    ]
    assert len(uses) >= 8
    assert [use for use in uses if "Purpose." not in use[1] and "_SEED_PURPOSE" not in use[1]] == []


def test_splitmix64_is_its_authors() -> None:
    """The first outputs of the reference implementation (Vigna, splitmix64.c) with seed 1234567."""
    states = np.uint64(1234567) + np.arange(1, 4, dtype=np.uint64) * GOLDEN
    assert splitmix64(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]
