"""Names of a source's files: which ones an operating system created, and which are parts of one file.

Only the standard library is imported here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# The first part of a split file, and the pattern of the others' names: pieces, or volumes of a RAR.
_PARTS = (
    (re.compile(r"(?P<stem>.*\.)(?P<number>0+1)"), r"(?!0+$)\d{{{digits}}}"),
    (re.compile(r"(?P<stem>.*\.part)(?P<number>0*1)\.rar", re.IGNORECASE), r"\d+\.rar"),
    (re.compile(r"(?P<stem>.*\.)(?P<number>rar)", re.IGNORECASE), r"[r-z]\d\d"),
)


def left_by_a_system(name: str) -> bool:
    """Whether a system created this file or folder, not its user: hidden files, macOS's resource forks, Synology's and
    Windows's thumbnails. Every source ignores them."""
    return name.startswith((".", "__MACOSX", "@eaDir")) or name.lower() in ("thumbs.db", "desktop.ini")


def parts_of(first: str, names: Iterable[str]) -> list[str]:
    """Return `first` and its further parts among `names`, in order.

    `x.zip.001` is followed by `x.zip.002`, `x.part1.rar` by `x.part2.rar`, `x.rar` by `x.r00`.
    """
    for first_part, further_part in _PARTS:
        if match := first_part.fullmatch(first):
            pattern = re.escape(match["stem"]) + further_part.format(digits=len(match["number"]))
            further = re.compile(pattern, first_part.flags)
            others = [name for name in names if name != first and further.fullmatch(name)]
            return [first, *sorted(others, key=lambda name: (len(name), name))]
    return [first]
