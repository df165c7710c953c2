"""The token of a mesh, which people keep in a file."""

from __future__ import annotations

import sys

from meshcee.errors import UsageError

__all__ = ["read_token"]

TOKEN_BYTES = 64 << 10


def read_token(text: str | None) -> str | None:
    """The token that `join` was given: itself, `@FILE`, or `-` for the first line of standard input.

    Every process of a machine can read the arguments of the others, and a shell keeps them. UsageError for a file without one.
    """
    if text is None or not (text == "-" or text.startswith("@")):
        return text
    if text == "-":
        found = sys.stdin.readline(TOKEN_BYTES).strip()
    else:
        try:
            with open(text[1:], encoding="utf-8") as file:
                found = file.readline(TOKEN_BYTES).strip()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise UsageError(f"--join {text}: the file cannot be read: {why}") from error
    if not found:
        raise UsageError(
            f"--join {text}: there is no token on the first line; write the line there that `meshcee peer` printed"
        )
    return found
