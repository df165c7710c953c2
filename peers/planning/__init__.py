"""Asking for a plan and answering: what the owner finds out about its job, the coordinator's service, plans that users give."""

from peers.planning.asking import ask_plan, question
from peers.planning.coordinator import Planned, PlanRequest, PlanService, plan_here, request_plan
from peers.planning.given import given_plan
from peers.planning.job_costs import costs_of, profile

__all__ = [
    "PlanRequest",
    "PlanService",
    "Planned",
    "ask_plan",
    "costs_of",
    "given_plan",
    "plan_here",
    "profile",
    "question",
    "request_plan",
]
