"""Plans and captured models for people: in words and figures, and as one HTML page each."""

from meshcee.show.pages import FIGURES, amount, capture_page, plan_page, size
from meshcee.show.words import explain

__all__ = ["FIGURES", "amount", "capture_page", "explain", "plan_page", "size"]
