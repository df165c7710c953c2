"""The command line: `meshcee`, or `python -m meshcee` where the script is not on the PATH."""

import os
import sys

__all__ = ["main"]


def _open_streams() -> None:
    """A standard stream that was closed (`<&-`) is an empty one: else the next file has its number, and libuv aborts on that."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free, and so its own
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))


def main() -> None:
    """Ctrl-C ends the command without a traceback, also while the command is still being loaded."""
    _open_streams()
    try:
        from peers.cli.main import main as command
    except KeyboardInterrupt:
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
