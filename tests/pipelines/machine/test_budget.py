"""The estimated time of trainings, in words."""

import pytest

from pipelines.machine.budget import _between


@pytest.mark.parametrize(
    ("least", "most", "words"),
    [
        (30.0, 50.0, "1 minute"),
        (300.0, 5400.0, "5 to 90 minutes"),
        (5400.0, 9000.0, "1.5 to 2.5 hours"),
        (7_562_783_880.0, 31_898_595_960.0, "2,100,773 to 8,860,721 hours"),
    ],
)
def test_the_unit_and_its_digits_suit_the_time(least: float, most: float, words: str) -> None:
    assert _between(least, most) == words
