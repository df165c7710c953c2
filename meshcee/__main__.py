"""`python -m meshcee`: the command line, for when the script is not on the PATH."""

from peers.cli.main import main

if __name__ == "__main__":
    main()
