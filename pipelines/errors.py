"""Errors of a store, in a folder or on S3; the message names the place and says what to do. And `Superseded`."""

from __future__ import annotations


class StoreError(Exception):
    """A store cannot do what was requested; the message names the store and says what to do."""


class StoreUnreachable(StoreError):  # noqa: N818 (named after the state of the store)
    """A store does not answer: wait and retry."""


class StoreAbsent(StoreError):  # noqa: N818 (named after the state of the store)
    """There is no store at an address."""


class StoreDamaged(StoreError):  # noqa: N818 (named after the state of the store)
    """An object in a store is damaged; the message names it. Only results that need it are affected.

    `problem` is the message without `remedy`, which says what to do.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}; {remedy}" if remedy else problem)
        self.problem, self.remedy = problem, remedy


class AliasMoved(StoreError):  # noqa: N818 (named after the state of the alias)
    """Another process has moved an alias since it was read."""


class Superseded(Exception):  # noqa: N818 (named after the state of the attempt)
    """A later attempt has taken over from this one, which must end and commit nothing more.

    This is not a user error, and needs no action, because the later attempt's job makes the result.
    """
