"""Every engine gives plain torch's weights, and continues from what every other has saved (docs/zero.md)."""

import pytest

from tests.support.zero_matrix import CASES, OBJECTIVES, Case, measure

# Every stage, every objective, and each value of every other dimension at each stage or its neighbour.
FEW = [
    Case(1, "bfloat16", 4, False, "SGD", 1),
    Case(0, "float32", 4, True, "AdamW", 2),
    Case(1, "float32", 1, True, "SGD", 2),
    Case(1, "bfloat16", 4, False, "AdamW", 2),
    Case(2, "bfloat16", 4, True, "SGD", 2),
    Case(3, "float32", 1, False, "AdamW", 2),
    Case(3, "float32", 1, True, "AdamW, averaged", 2),
    Case(3, "bfloat16", 4, True, "AdamW", 2, "mae"),
    Case(3, "float32", 4, True, "SGD", 2, "distillation"),
    Case(1, "float32", 1, True, "SGD", 2, "contrastive"),
    Case(0, "bfloat16", 4, False, "Muon", 2),
]
FEW += [
    next(case for case in CASES if case.objective == objective)
    for objective in OBJECTIVES
    if objective not in {case.objective for case in FEW}
]
MORE = [
    Case(0, "bfloat16", 1, False, "SGD", 2),
    Case(1, "bfloat16", 1, True, "AdamW", 2),
    Case(1, "bfloat16", 1, True, "AdamW, averaged", 2),
    Case(2, "float32", 4, False, "AdamW", 2),
    Case(3, "bfloat16", 4, True, "AdamW", 2),
    Case(0, "float32", 1, True, "Muon", 2),
    Case(0, "float32", 1, True, "Muon, averaged", 1),
]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [FEW, pytest.param(MORE, marks=pytest.mark.full)], ids=["few", "more"])
def test_some_ways_to_train_give_the_weights_of_plain_torch(cases: list[Case]) -> None:
    """benchmarks/zero_matrix.py has all of them."""
    wrong = [result for result in measure(cases) if not result.holds]
    assert not wrong, "\n".join(map(str, wrong))
