"""`meshcee`, but whoever owns a job says that its model can only be in one pipeline: what replicas gain is the difference."""

from peers.cli.main import main
from peers.planning import job_costs


def never(program: object) -> str:
    return "a benchmark compares"


if __name__ == "__main__":
    job_costs.why_one_pipeline = never
    main()
