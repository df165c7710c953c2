"""`meshcee ui` and `meshcee report`: the picture of a mesh or a run as a page, live on this machine or as one file.

What is shown is made in `meshcee.picture`. Here is where it comes from (sources), how a browser gets it (server, which needs the
extra `ui`), and the page itself (page, static/).
"""

from peers.cli.ui.command import run_report, run_ui
from peers.cli.ui.page import self_contained
from peers.cli.ui.watching import page_of

__all__ = ["page_of", "run_report", "run_ui", "self_contained"]
