"""The few faults that an episode's failure needs: repeat it without some of them, as long as it still fails alike."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.drivers import Episode


def failure(seed: int, kept: frozenset[str] | None = None) -> tuple[str, dict[str, str]] | None:
    """Return how an episode with these faults fails, and the faults that happened; None if it finds nothing."""
    world = Episode(seed, kept=kept)
    try:
        world.run()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0], world.faults.happened
    return None


def shrunk(seed: int) -> str:
    """Return a failing episode's error, and the faults without any one of which it does not fail like that."""
    found = failure(seed)
    assert found is not None, f"episode {seed} finds nothing"
    error, happened = found

    def fails(names: list[str]) -> bool:
        again = failure(seed, frozenset(names))
        return again is not None and again[0] == error

    few = fewest(fails, [*happened])
    last = failure(seed, frozenset(few))
    lines = [f"  {last[1].get(name, name)}" for name in few] if last else [f"  {name}" for name in few]
    return "\n".join([f"episode {seed} with {len(few)} of {len(happened)} faults: {error}", *lines])


def fewest(fails: Callable[[list[str]], bool], names: list[str]) -> list[str]:
    """Leave out parts, large ones first, until each name that remains is needed."""
    size = max(1, len(names) // 2)
    while True:
        parts = (names[:start] + names[start + size :] for start in range(0, len(names), size))
        fewer = next(filter(fails, parts), None)
        if fewer is not None:
            names = fewer
        elif size > 1:
            size //= 2
        else:
            return names
