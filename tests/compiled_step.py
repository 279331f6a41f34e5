"""A step of the demo model's shapes, compiled without any weights: on this machine or ahead of time for another."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from pagedjax.engine.state import empty_state, step_layout
from pagedjax.engine.step import StepProgram, jit_step
from pagedjax.models import Llama, ModelConfig
from pagedjax.nnx import cache_layers
from pagedjax.paged import PagesSpec


def layers_of_the_demo_model(num_layers, dtype="float32"):
    """SmolLM2-135M with fewer layers; its parameters are shapes only."""
    config = ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=num_layers,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
    )
    return Llama(config, rngs=None, dtype=dtype)


def compiled_step(model, bucket, placement, *, num_blocks, block_size=32):
    """The compiled step of a bucket, and the bytes of its pages."""
    dtype = model.embedding.get_value().dtype
    spec = PagesSpec.for_layers(cache_layers(model), num_blocks=num_blocks, block_size=block_size, dtype=dtype)
    graphdef, params = nnx.split(model)
    params, params_tree = jax.tree.flatten(params)
    everywhere = NamedSharding(placement.mesh, PartitionSpec())

    def on_mesh(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)

    pages = spec.shape_dtypes(placement.mesh)
    state = jax.eval_shape(lambda: empty_state((), groups=1, rows=32, max_blocks=64))
    state = jax.tree.map(on_mesh, state)
    state = type(state)(**{**vars(state), "pages": pages})
    packed = jax.ShapeDtypeStruct((step_layout(bucket).size,), jnp.int32, sharding=everywhere)
    step = jit_step(StepProgram(graphdef, params_tree, spec, placement), bucket)
    return step.lower(jax.tree.map(on_mesh, params), state, packed).compile(), spec.num_bytes
