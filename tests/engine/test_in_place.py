"""The compiled step updates the pages in place, and needs no memory that grows with the pool."""

import pytest
from compiled_step import compiled_step, layers_of_the_demo_model

from pagedjax.engine.buckets import Bucket
from pagedjax.paged import default_placement


@pytest.mark.parametrize("bucket", [Bucket(8, 0, 0, 8), Bucket(4, 32, 2, 6)], ids=str)
def test_a_step_aliases_all_pages_and_its_temporaries_do_not_grow_with_the_pool(bucket):
    model = layers_of_the_demo_model(3)
    small, pages_bytes = compiled_step(model, bucket, default_placement(), num_blocks=100)
    large, more_bytes = compiled_step(model, bucket, default_placement(), num_blocks=1000)
    assert more_bytes == 10 * pages_bytes
    assert small.memory_analysis().alias_size_in_bytes >= pages_bytes
    assert large.memory_analysis().alias_size_in_bytes >= more_bytes
    assert small.memory_analysis().temp_size_in_bytes == large.memory_analysis().temp_size_in_bytes
