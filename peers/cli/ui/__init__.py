"""`meshcee ui` and `meshcee report`: the picture of a mesh or a run as a page, live on this machine or as one file.

What is shown is made in `meshcee.picture`. Here is where it comes from (sources), how a browser gets it (server, which needs the
extra `ui`), and the page itself (page, static/). What may be changed from there is in acts and wishes. Only the page as a file
needs neither torch nor a mesh.
"""

from peers.cli.ui.page import self_contained

__all__ = ["self_contained"]
