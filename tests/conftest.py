"""Settings that every test shares."""

import torch
from hypothesis import HealthCheck, settings

# Two slow cores must not turn a property test into a timing test.
settings.register_profile("meshcee", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("meshcee")

# The contract of equality is for one number of threads: every process that a test starts has one, and so has this one.
torch.set_num_threads(1)
