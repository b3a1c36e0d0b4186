"""Likely wrong labels for the page: the most likely ones, and which classes are confused how often.

In: LABEL_ISSUES (`ray_jobs.evaluation.label_issues`). Out: plain dictionaries.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa

SHOWN = 100  # images on the page
PAIRS = 10  # pairs of label and suggested class on the page


def describe(table: pa.Table) -> dict[str, Any]:
    """Return the number of likely wrong labels, the first SHOWN of them, and the most frequent pairs of classes."""
    labels, suggested = table["label"].to_pylist(), table["suggested"].to_pylist()
    counts = Counter(zip(labels, suggested, strict=True))
    pairs = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return {
        "num_issues": len(table),
        "issues": table.slice(0, SHOWN).to_pylist(),
        "pairs": [
            {"label": label, "suggested": other, "images": count} for (label, other), count in pairs[:PAIRS]
        ],
    }
