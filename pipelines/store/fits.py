"""The name of a fine-tuning's fit, in its log, its checkpoints and, for a trial, the ledger.

    trial-<number>[-p<digest>]-<fold>
    refit-<number>[-p<digest>][-<last step>]-<draw>

On GPUs, results vary a little, so another attempt may choose another point or last step for its refits.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, Self

_NAME = re.compile(
    r"(?P<kind>trial|refit)-(?P<number>\d{1,9})(?:-p(?P<digest>[0-9a-f]+))?(?:-(?P<last>[1-9]\d{0,17}))?-(?P<part>\d{1,9})"
)


class FitName(NamedTuple):
    """The parts of a fit's name, unique in its stage."""

    kind: Literal["trial", "refit"]
    number: int
    """The number of its point in the order of trials, from 0; without a search, the number of its rate."""
    part: int
    """The fold of a trial, the draw of a refit."""
    digest: str | None = None
    """The digest of a point that Optuna proposed: another attempt may give the number to another point."""
    last_step: int | None = None
    """The step at which a refit with early stopping ends."""

    def __str__(self) -> str:
        digest = "" if self.digest is None else f"-p{self.digest}"
        last = "" if self.last_step is None else f"-{self.last_step}"
        return f"{self.kind}-{self.number}{digest}{last}-{self.part}"

    @classmethod
    def parse(cls, name: str | None) -> Self | None:
        """Return the fit with this name; None if it is not a fit's name: any program may write into a log."""
        found = _NAME.fullmatch(name or "")
        if found is None or (found["kind"] == "trial" and found["last"] is not None):
            return None
        kind: Literal["trial", "refit"] = "trial" if found["kind"] == "trial" else "refit"
        last = None if found["last"] is None else int(found["last"])
        return cls(kind, int(found["number"]), int(found["part"]), found["digest"], last)
