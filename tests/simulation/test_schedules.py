"""Episodes of schedules find nothing in the code as it is, and soon find bugs that are planted into it."""

from collections import Counter

import pytest

from tests.simulation.bugs import Bug, planted
from tests.simulation.schedule_bugs import BUGS
from tests.simulation.schedules import episode

EPISODES = 10
SOON = {  # are found in the first few episodes; benchmarks/simulation.py looks for all of them
    "decides a tick over another server's decision",
    "looks for the run before by a stale read",
    "uses the key of a deleted artifact again",
}


def test_an_episode_finds_nothing_and_much_happens_in_some() -> None:
    seen: Counter[tuple[str, str, str]] = Counter()
    for seed in range(EPISODES):
        episode(seed, seen)
    kinds = {each[:2] for each in seen}
    assert {("tick", "run"), ("tick", "skip"), ("alias", "rule"), ("notice", "promoted"), ("gc", "kept")} <= kinds


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.name in SOON], ids=lambda bug: str(bug.name))
def test_a_planted_bug_is_found(bug: Bug) -> None:
    with planted(bug), pytest.raises(BaseException, match=r"schedules\.episode\("):  # whatever the bug breaks
        for seed in range(3 * EPISODES):
            episode(seed)
