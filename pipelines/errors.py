"""Errors of a store, whichever it is; the message names the place and says what would be right."""

from __future__ import annotations


class StoreError(Exception):
    """A store that can't be used as asked; the message names it and says what would be right."""


class StoreUnreachable(StoreError):  # noqa: N818 (named for what it tells)
    """A store that does not answer: wait and ask again."""


class StoreAbsent(StoreError):  # noqa: N818 (named for what it tells)
    """There is no store at that address."""


class StoreDamaged(StoreError):  # noqa: N818 (named for what it tells)
    """A damaged object, which the message names; only what needs it is affected.

    `what` is the message without `remedy`, which says what to do.
    """

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what}; {remedy}" if remedy else what)
        self.what, self.remedy = what, remedy
