"""Damaged files for tests of readers: what comes out of them is a ValueError, or a result."""

import random
from collections.abc import Callable


def refused(read: Callable[[bytes], object], data: bytes, times: int) -> int:
    """How many of so many mutations of `data` raised ValueError when they were read; anything else is raised."""
    rng, count = random.Random(0), 0
    for _ in range(times):
        try:
            read(mutated(data, rng))
        except ValueError:
            count += 1
    return count


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, some cut out, some doubled, or the end cut off."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(found) or 1)
        end = start + rng.choice((1, 1, 1, 4, 16))
        match rng.randrange(5):
            case 0 | 1:
                found[start:end] = rng.randbytes(min(end, len(found)) - start)
            case 2:
                del found[start:end]
            case 3:
                found[start:start] = found[start:end]
            case 4 if rng.random() < 0.2:
                del found[start:]
    return bytes(found)
