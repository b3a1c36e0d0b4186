"""Episodes of drivers find nothing in the code as it is, and soon find bugs that are planted into it."""

import pytest

from tests.simulation.bugs import BUGS, Bug, planted
from tests.simulation.drivers import episode

EPISODES = 60
SOON = {  # are found in the first few episodes; benchmarks/simulation.py looks for all of them
    "sees no new sign of life",
    "writes its attempt over another driver's",
    "submits what is not written",
    "does not record that a run is over",
    "continues a run that is over",
}


@pytest.mark.parametrize("block", range(4))
def test_an_episode_finds_nothing(block: int) -> None:
    for seed in range(block * EPISODES // 4, (block + 1) * EPISODES // 4):
        episode(seed)


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.name in SOON], ids=lambda bug: str(bug.name))
def test_a_planted_bug_is_found(bug: Bug) -> None:
    with planted(bug), pytest.raises(BaseException, match=r"drivers\.episode\("):  # whatever the bug breaks
        for seed in range(20):
            episode(seed)


def test_every_bug_can_be_planted() -> None:
    for bug in BUGS:
        with planted(bug):
            pass
