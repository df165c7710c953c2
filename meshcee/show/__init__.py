"""Plans and captured models for people: in words and figures, and as one HTML page each."""

from meshcee.show.explain import explain
from meshcee.show.pages import FIGURES, amount, capture_page, plan_page, size

__all__ = ["FIGURES", "amount", "capture_page", "explain", "plan_page", "size"]
