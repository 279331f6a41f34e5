"""Tests that compile for TPUs and GPUs that are not here; all of this folder is marked `aot`.

A test takes the fixture `target` and runs once for each target, or for those that it names:

    @pytest.mark.parametrize("target", ["tpu-v6e", "gpu-h200"], indirect=True)
    def test_something(target):
        mesh = mesh_for(target)

It is skipped only where the compiler of the target cannot be imported, and the reason says what to install.
"""

import os
from pathlib import Path

import jax
import pytest

from pagedjax.plan.targets import TARGETS, Target, missing_compiler, target_named

# With the compilers installed jax would look for a TPU and a GPU first: what these tests run, they run on the CPU.
if not os.environ.get("JAX_PLATFORMS"):
    jax.config.update("jax_platforms", "cpu")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.aot)


@pytest.fixture(params=list(TARGETS))
def target(request: pytest.FixtureRequest) -> Target:
    if reason := missing_compiler(request.param):
        pytest.skip(reason)
    return target_named(request.param)
