"""The one exception for what the user can fix. It imports nothing, so that every room can import it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class UserError(ValueError):
    """A request, a file or a machine that does not fit; the message says what is wrong and what to do.

    A stage that ends with it exits with code 2 and is not retried. Every other exception is a bug, or passes: exit
    code 1, and another attempt. So raise it only for what the user can change, and not for a mistake in our own code;
    a reader of files turns what a library raises about the bytes into it right where it calls the library.
    """


def reasons(error: ValidationError) -> str:
    """What pydantic found, in one line."""
    return "; ".join(
        f"{'.'.join(map(str, (*problem['loc'], '')))[:-1]} {problem['msg'].removeprefix('Value error, ')}".strip()
        for problem in error.errors()
    )
