"""The whole decode step with the xla backend, compiled for TPUs and GPUs: pages aliased, nothing grows."""

import pytest
from compiled_step import compiled_step, layers_of_the_demo_model

from pagedjax.engine.buckets import Bucket
from pagedjax.paged import HEADS_AXIS, Placement
from pagedjax.plan.targets import Target, mesh_for


@pytest.mark.parametrize("target", ["tpu-v5e", "tpu-v6e", "gpu-h100", "gpu-h200"], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decode_step_aliases_all_pages_and_its_temporaries_do_not_grow(target: Target, dtype: str):
    model = layers_of_the_demo_model(3, dtype)
    placement = Placement(mesh_for(target, 1, HEADS_AXIS))
    bucket = Bucket(8, 0, 0, 8)  # and pools too large for a TPU's VMEM, where the compiler would keep small ones
    small, pages_bytes = compiled_step(model, bucket, placement, num_blocks=1280, block_size=64)
    large, more_bytes = compiled_step(model, bucket, placement, num_blocks=12800, block_size=64)
    assert small.memory_analysis().alias_size_in_bytes >= pages_bytes
    assert large.memory_analysis().alias_size_in_bytes >= more_bytes
    assert large.memory_analysis().temp_size_in_bytes == small.memory_analysis().temp_size_in_bytes
