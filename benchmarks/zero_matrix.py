"""Every way to train, compared with plain torch: `python benchmarks/zero_matrix.py`.

ZeRO stages 0 to 3 and one process, float32 and bfloat16, 1 and 4 micro-batches, with and without clipping, AdamW and
SGD with momentum; and AdamW with averaged weights, layer-wise rates and decay times the schedule. Without ZeRO, the
same with Muon. The modules of other objectives at stage 3, MoCo's at 2. Each case trains a small ViT for six steps. New
engines continue from its state after three; then a gradient that is not finite must change nothing.
tests/support/zero_matrix.py has the comparisons and bounds; `make test-all` checks some of the cases.

Prints the tables and writes them to benchmarks/results/; takes about 7 minutes on two cores.
"""

from __future__ import annotations

import itertools
import os
from importlib.metadata import version

import torch
from common import keep, setting

from tests.support.zero_matrix import BATCH, CASES, LIMITS, MUON_LIMITS, SAVED, STEPS, Result, measure

OTHERS = {
    "AdamW, clipped": ("AdamW", True),
    "AdamW": ("AdamW", False),
    "SGD, clipped": ("SGD", True),
    "SGD": ("SGD", False),
    "averaged, clipped": ("AdamW, averaged", True),
}
MUON = {
    "Muon, clipped": ("Muon", True),
    "Muon": ("Muon", False),
    "averaged, clipped": ("Muon, averaged", True),
}


def main() -> None:
    """Run all cases, print the tables and keep them."""
    load = os.getloadavg()[0]
    results = measure(CASES)
    wrong = [str(result) for result in results if not result.holds]
    keep(
        "zero_matrix.md",
        [
            "# Every way to train, compared with plain torch",
            "",
            f"`python benchmarks/zero_matrix.py`, {setting(load)}, torch {torch.__version__}, "
            f"DeepSpeed {version('deepspeed')}.",
            f"Batches of {BATCH} images; {STEPS} steps; saved after {SAVED}. {len(results)} cases, of which "
            f"{len(results) - len(wrong)} are within the bounds.",
            "",
            "The columns of optimizers show the largest difference of a weight tensor from a plain torch loop over"
            f" the whole batch, by norm, relative to the tensor's norm: at most {LIMITS['float32']:.0e} in float32 (or"
            " twice what the loop in eight parts differs from itself on this CPU) and"
            f' {LIMITS["bfloat16"]:.0e} in bfloat16. "Of the change" is the same for all weights together, relative'
            ' to how far the training moved them. "Continued" compares a new engine of the same kind with the'
            ' undisturbed training; "continued by others" compares one process, and another stage. Rates are at most'
            " 0.001 for AdamW and 0.06 for SGD: with 0.003, AdamW exceeds the bounds (3e-06 and 6e-03), probably"
            " because it scales rounding differences up.",
            "",
            *_table(results, OTHERS),
            "",
            "Muon's iterations round to bfloat16 even with `dtype: float32`, which enlarges rounding differences of the"
            f" gradients. Its bounds are {MUON_LIMITS['float32'][0]:.0e} in float32 and"
            f" {MUON_LIMITS['bfloat16'][0]:.0e} in bfloat16, and of the change {MUON_LIMITS['float32'][1]:.0e} and"
            f" {MUON_LIMITS['bfloat16'][1]:.0e}. Rates are at most 0.001.",
            "",
            *_table(results, MUON),
            *wrong,
        ],
    )


def _table(results: list[Result], columns: dict[str, tuple[str, bool]]) -> list[str]:
    """Return a table of the results of some optimizers, {heading: (optimizer, whether gradients are clipped)}."""

    def rows_of(result: Result) -> tuple[int, int, str, int, str]:
        case = result.case
        return case.workers, case.zero_stage, case.dtype, case.accumulation, case.objective

    shown = [result for result in results if (result.case.optimizer, result.case.clips) in columns.values()]
    rows = []
    for (workers, stage, dtype, parts, objective), group in itertools.groupby(sorted(shown, key=rows_of), rows_of):
        own = {(result.case.optimizer, result.case.clips): result for result in group}
        cells = [f"2, ZeRO-{stage}" if workers > 1 else "1", dtype, str(parts)]
        cells[0] += "" if objective == "softmax" else f", {objective}"
        cells += [f"{own[ways].difference:.0e}" if ways in own else "" for ways in columns.values()]
        cells.append(f"{max(result.of_change for result in own.values()):.0e}")
        cells.append("same bits" if all(result.is_resumed_exactly for result in own.values()) else "**other bits**")
        cells.append(f"{max(max(result.resumed.values()) for result in own.values()):.0e}")
        cells.append("skipped" if all(result.is_guarded for result in own.values()) else "**applied**")
        rows.append(f"| {' | '.join(cells)} |")

    return [
        f"| workers | dtype | micro-batches | {' | '.join(columns)}"
        " | of the change | continued | continued by others | not finite |",
        "|---|---|---:|" + "---:|" * (len(columns) + 1) + "---|---:|---|",
        *rows,
    ]


if __name__ == "__main__":
    main()
