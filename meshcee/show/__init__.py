"""Plans and comparisons of plans for people: in words and figures."""

from meshcee.show.comparison import comparison_text
from meshcee.show.words import explain, with_names

__all__ = ["comparison_text", "explain", "with_names"]
