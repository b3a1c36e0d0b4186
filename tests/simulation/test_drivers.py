"""Episodes of drivers find nothing in the code as it is, and the bugs that are planted into it."""

import pytest

from tests.simulation.bugs import BUGS, planted
from tests.simulation.drivers import episode

EPISODES = 100
SOON = {  # bug -> an episode that finds it
}


@pytest.mark.parametrize("block", range(4))
def test_an_episode_finds_nothing(block: int) -> None:
    for seed in range(block * EPISODES // 4, (block + 1) * EPISODES // 4):
        episode(seed)


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.name in SOON], ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug) -> None:  # type: ignore[no-untyped-def]
    with planted(bug), pytest.raises(BaseException) as found:
        episode(SOON[bug.name])
    assert f"drivers.episode({SOON[bug.name]})" in found.value.__notes__


def test_every_bug_can_be_planted() -> None:
    for bug in BUGS:
        with planted(bug):
            pass
