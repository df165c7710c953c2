"""Whether the captured model is the user's module: what a pass may change, what two passes differ in, and which line did it.

The idea: everything here looks at ordinary eager passes of the user's own code; it knows of graphs only what a Program says,
and of peers nothing. `peers/net.py` runs both sides and compares them by these means.

Watch     the user's state (tensors, attributes, closures, globals, generators): what has changed, and all of it put back
Recorder  what each line of an eager pass computed
unlike    the first of those lines that the program does not compute; unlike_backwards, that it does not differentiate alike
line_that the line after which something holds
"""

from meshcee.equality.lines import line_that
from meshcee.equality.recorder import Recorder, Told, unlike, unlike_backwards, values_of
from meshcee.equality.watch import Slot, Watch, digest

__all__ = ["Recorder", "Slot", "Told", "Watch", "digest", "line_that", "unlike", "unlike_backwards", "values_of"]
