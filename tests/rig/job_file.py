"""The text of a job file that trains in a moment."""

__all__ = ["JOB"]

JOB = """
import torch
import meshcee

torch.manual_seed(0)
x = torch.randn(64, 4)
job = meshcee.Job(
    model=torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
    loss=torch.nn.functional.mse_loss,
    data=[(row, row.sum(0, keepdim=True)) for row in x],
    optimizer=meshcee.Optimizer("SGD", lr=0.05),
    batch_size=16,
    steps=3,
)
"""
