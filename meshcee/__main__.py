"""The command line: `meshcee`, or `python -m meshcee` where the script is not on the PATH."""

import sys

__all__ = ["main"]


def main() -> None:
    """Ctrl-C ends the command without a traceback, also while the command is still being loaded."""
    try:
        from peers.cli.main import main as command
    except KeyboardInterrupt:
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
