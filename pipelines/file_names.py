"""Names of a source's files: which ones an operating system left, and which are parts of one file.

Only the standard library is imported here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# The first part of a file in several, and what its other parts are called: cut into pieces, or volumes of a RAR.
_PARTS = (
    (re.compile(r"(?P<stem>.*\.)(?P<number>0+1)"), r"(?!0+$)\d{{{digits}}}"),
    (re.compile(r"(?P<stem>.*\.part)(?P<number>0*1)\.rar", re.IGNORECASE), r"\d+\.rar"),
    (re.compile(r"(?P<stem>.*\.)(?P<number>rar)", re.IGNORECASE), r"[r-z]\d\d"),
)


def left_by_a_system(name: str) -> bool:
    """Whether a system left this file or folder, not its user: hidden ones, macOS's shadows, Synology's and Windows's
    thumbnails. Every source leaves them out."""
    return name.startswith((".", "__MACOSX", "@eaDir")) or name.lower() in ("thumbs.db", "desktop.ini")


def parts_of(first: str, names: Iterable[str]) -> list[str]:
    """Return `first` and those of these names that are its further parts, in order.

    `x.zip.001` is followed by `x.zip.002`, `x.part1.rar` by `x.part2.rar`, `x.rar` by `x.r00`.
    """
    for begins, follows in _PARTS:
        if found := begins.fullmatch(first):
            pattern = re.escape(found["stem"]) + follows.format(digits=len(found["number"]))
            other = re.compile(pattern, begins.flags)
            more = [name for name in names if name != first and other.fullmatch(name)]
            return [first, *sorted(more, key=lambda name: (len(name), name))]
    return [first]
