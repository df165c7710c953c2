"""The screen of `meshcee top`, over textual.

The idea: once a second the source is brought up to date, and every part of the screen gets what `drawing` makes of the picture. A
look that fails keeps the screen and says so; the next one may do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import DataTable, Footer, Sparkline, Static

from meshcee.errors import MeshceeError
from meshcee.picture import Picture
from peers.cli.session import printable
from peers.cli.top import drawing
from peers.cli.ui.sources import Source

__all__ = ["Top"]

LOOKS_EVERY_S = 1.0


class Top(App[None]):
    """Read-only: nothing here changes the mesh."""

    CSS = """
    #head { height: 1; background: $primary; color: $text; }
    #peers { height: 2fr; min-height: 5; }
    #middle { height: 3fr; }
    #plan { width: 3fr; border: round $secondary; }
    #side { width: 2fr; }
    #loss { height: 7; border: round $secondary; }
    #events { height: 1fr; border: round $secondary; }
    #limit { height: auto; max-height: 4; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [("q", "quit", "Quit"), ("ctrl+c", "quit", "Quit")]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, source: Source, *, clock: Callable[[], float] = time.time) -> None:
        super().__init__()
        self.source = source
        self._clock = clock

    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        yield DataTable[Text](id="peers", cursor_type="none", zebra_stripes=True)
        with Horizontal(id="middle"):
            with VerticalScroll(id="plan"):
                yield Static(id="pipeline", markup=False)
            with Vertical(id="side"):
                yield Sparkline(id="loss", summary_function=min)
                with VerticalScroll(id="events"):
                    yield Static(id="moments", markup=False)
        yield Static(id="limit", markup=False)
        yield Footer()

    async def on_mount(self) -> None:
        self.query_one("#peers", DataTable).add_columns(*drawing.COLUMNS)
        for part, title in (("plan", "pipeline"), ("loss", "loss"), ("events", "events")):
            self.query_one(f"#{part}").border_title = title
        await self.look()
        self.set_interval(LOOKS_EVERY_S, self.look)

    async def look(self) -> None:
        """Bring the source up to date, and the screen."""
        trouble = ""
        try:
            while await self.source.refresh():
                pass  # a long run is read piece by piece
        except MeshceeError as error:
            trouble = printable(f"no new look: {error}")
        self.draw(self.source.painter.picture(self._clock()), trouble)

    def draw(self, picture: Picture, trouble: str = "") -> None:
        self._say("head", drawing.headline(picture))
        table: DataTable[Text] = self.query_one("#peers", DataTable)
        table.clear()
        for row in drawing.peer_rows(picture):
            table.add_row(*map(Text, row))
        self._say("pipeline", "\n".join(drawing.pipeline(picture)))
        curve = self.query_one("#loss", Sparkline)
        curve.data = drawing.losses(picture)
        run = picture.run
        curve.border_title = f"loss {run.loss:.4f}" if run is not None and run.loss is not None else "loss"
        self._say("moments", "\n".join(drawing.events(picture)))
        self._say("limit", "\n".join([trouble] * bool(trouble) + drawing.limits(picture)))

    def _say(self, part: str, text: str) -> None:
        self.query_one(f"#{part}", Static).update(Text(text))
