"""The exception for problems that the user can fix. This module imports nothing, so every package can import it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class UserError(ValueError):
    """A problem with a request, a file or a machine; the message says what is wrong and what to do.

    A stage that ends with it exits with code 2 and is not retried. Any other exception is a bug or temporary: the stage
    exits with code 1 and is attempted again. Raise it only for what the user can change, not for a mistake in our own
    code. A reader of files converts a library's exception about the bytes where it calls the library.
    """


def reasons(error: ValidationError) -> str:
    """Return pydantic's error messages in one line."""
    return "; ".join(
        f"{'.'.join(map(str, (*problem['loc'], '')))[:-1]} {problem['msg'].removeprefix('Value error, ')}".strip()
        for problem in error.errors()
    )
