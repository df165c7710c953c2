"""`meshcee top`: the picture of a mesh in a terminal, live, over ssh as well.

What is shown is made in `meshcee.picture`. `drawing` turns it into lines and cells, `app` puts these on the screen and needs the
extra `top`.
"""

from peers.cli.top.command import run_top

__all__ = ["run_top"]
