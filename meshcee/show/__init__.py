"""Plans, comparisons of plans and captured models for people: in words and figures, and as one HTML page each."""

from meshcee.show.comparison import comparison_text
from meshcee.show.pages import FIGURES, amount, capture_page, plan_page, size
from meshcee.show.words import explain

__all__ = ["FIGURES", "amount", "capture_page", "comparison_text", "explain", "plan_page", "size"]
