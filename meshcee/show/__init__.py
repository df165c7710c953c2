"""Plans, comparisons of plans and captured models for people: in words and figures, and a model as a page."""

from meshcee.show.comparison import comparison_text
from meshcee.show.pages import FIGURES, capture_page
from meshcee.show.words import explain

__all__ = ["FIGURES", "capture_page", "comparison_text", "explain"]
