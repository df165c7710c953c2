"""The token of a mesh, which people keep in a file."""

from __future__ import annotations

import sys

from meshcee.errors import UsageError

__all__ = ["read_token"]

TOKEN_BYTES = 64 << 10


def read_token(text: str | None) -> str | None:
    """The token that `join` was given: itself, `@FILE`, or `-` for the first line of standard input.

    Every process of a machine can read the arguments of the others, and a shell keeps them. It may stand behind
    `--join`, in the line that a peer prints. UsageError where there is none.
    """
    if text is None:
        return None
    if not text.strip():  # of a variable that a script has not set: it would found a mesh, or look at an empty one
        raise UsageError("--join is empty: give it the line that `meshcee peer` printed, or leave --join out")
    found = text
    if text == "-" or text.startswith("@"):
        try:
            if text == "-":
                found = sys.stdin.readline(TOKEN_BYTES)
            else:
                with open(text[1:], encoding="utf-8-sig") as file:
                    found = file.readline(TOKEN_BYTES)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise UsageError(f"--join {text}: the file cannot be read: {why}") from error
    token = found.rpartition("--join")[2].strip()
    if not token or not token.isprintable():
        raise UsageError(
            f"--join {text:.100}: there is no token on the first line; write the line there that `meshcee peer` printed"
        )
    return token
