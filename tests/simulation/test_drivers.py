"""Episodes of drivers find nothing in the code as it is, and soon find bugs that are planted into it."""

import pytest

from tests.simulation import schedule_bugs
from tests.simulation.bugs import BUGS, Bug, planted
from tests.simulation.drivers import episode
from tests.simulation.orders import in_order, orders
from tests.simulation.shrinking import failure, fewest, shrunk

EPISODES = 40
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


def test_two_drivers_find_nothing_in_any_order_of_their_first_requests() -> None:
    for order in orders(4):  # benchmarks/simulation.py has those of 8
        in_order(order)


@pytest.mark.parametrize("name", ["writes its attempt over another driver's", "takes another driver's attempt for"])
def test_some_order_of_requests_finds_a_race(name: str) -> None:
    [bug] = [bug for bug in BUGS if bug.name.startswith(name)]
    with planted(bug), pytest.raises(BaseException, match=r"orders\.in_order\("):
        for order in orders(4):
            in_order(order)


def test_a_failure_is_shrunk_to_the_faults_that_it_needs() -> None:
    [bug] = [bug for bug in BUGS if bug.name == "does not record that a run is over"]
    with planted(bug):
        seed = next(seed for seed in range(20) if (found := failure(seed)) is not None and found[1])
        assert shrunk(seed).startswith(f"episode {seed} with 0 of"), "it needs none"


def test_only_what_is_needed_is_left() -> None:
    assert fewest(lambda some: {"c", "f"} <= {*some}, [*"abcdefgh"]) == ["c", "f"]


def test_every_bug_can_be_planted() -> None:
    for bug in (*BUGS, *schedule_bugs.BUGS):
        with planted(bug):
            pass
