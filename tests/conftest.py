"""What all tests share: one thread a process, a fixed seed, and the profile of hypothesis."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from comfetch.layers import REGISTRY

settings.register_profile(
    "comfetch",
    deadline=None,  # the machine is shared
    derandomize=True,  # a red test stays red until it is mended
    database=None,
    max_examples=40,
    print_blob=False,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.load_profile("comfetch")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def registry() -> Iterator[dict]:
    """Give the registry of layers, and take back what a test adds to it."""
    before = dict(REGISTRY)
    yield REGISTRY
    REGISTRY.clear()
    REGISTRY.update(before)
