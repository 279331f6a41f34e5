"""The two products of decoding, queries by keys and weights by values, over whole blocks read through a table.

With few query heads to a KV head both are bound by memory, and what costs time on a CPU is writing down what was
gathered and reading it again: once for the gather, then for each product. The fused forms avoid that. They are sums
that XLA compiles into one loop with the gather inside, so that keys and values are read from the pages once and never
stored. Two things make that loop fast. One reduction with a result for each query head of the group reads a lane once
for all of them (and is not handed to the library that takes plain sums, which would need its input in memory). And each
sum is taken over a few terms only, with eight or more contiguous lanes beside them, which the compiler turns into
vector instructions; a small second sum finishes it. Summing along the lanes directly stays scalar.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.kernels.xla.options import Options, Sources, read_heads, read_scales

LANES = 8  # of a vector of float32 in AVX2; 16 measured slower
TERMS = 8  # tokens of a first sum; 4 and 16 measured slower
MAX_GROUP = 4  # query heads to a KV head from which matrix products are the better form


def query_scores(
    q: jax.Array, sources: Sources, blocks: jax.Array, options: Options, narrow: jnp.dtype, wide: jnp.dtype
) -> jax.Array:
    """Products of queries with the keys of whole blocks, before scale, cap and mask.

    Args:
      q: [batch, num_kv_heads, group, k_dim].
      sources: pages and what belongs to them.
      blocks: int32 [batch, n].
      options: static.
      narrow: dtype in which matrix products are taken.
      wide: dtype of the sums.

    Returns:
      ``wide`` [batch, num_kv_heads, group, n * block_size]; anything at all where nothing was written.
    """

    def by_dot(q: jax.Array, sources: Sources, blocks: jax.Array) -> jax.Array:
        k = read_heads(sources, blocks, 0, options.k_dim).astype(narrow)
        return jnp.einsum("bhgd,bhsd->bhgs", q.astype(narrow), k, precision="highest", preferred_element_type=wide)

    def fused(q: jax.Array, sources: Sources, blocks: jax.Array) -> jax.Array:
        k = read_heads(sources, blocks, 0, options.k_dim).astype(wide)
        k = k.reshape(*k.shape[:-1], -1, LANES)
        queries = q.astype(wide).reshape(*q.shape[:3], 1, -1, LANES)
        sums = _sums([queries[:, :, g] * k for g in range(q.shape[2])], axis=3)
        ones = jnp.ones((LANES, 1), wide)
        sums = [jnp.einsum("bhsl,lo->bhso", x, ones, precision="highest")[..., 0] for x in sums]
        return jnp.stack(sums, axis=2)

    scores = _choose(fused, by_dot, q.shape[2] <= MAX_GROUP and options.k_dim % LANES == 0, q, sources, blocks)
    return scores if sources.scales is None else scores * read_scales(sources, blocks, 0)[:, :, None]


def weighted_values(
    weights: jax.Array,
    seen: jax.Array,
    sources: Sources,
    blocks: jax.Array,
    options: Options,
    narrow: jnp.dtype,
    wide: jnp.dtype,
) -> jax.Array:
    """Sums of the values of whole blocks, times weights.

    Args:
      weights: ``wide`` [batch, num_kv_heads, group, n * block_size].
      seen: bool [batch, n * block_size]: the values that count; others may be anything.
      sources: pages and what belongs to them.
      blocks: int32 [batch, n].
      options: static.
      narrow: dtype in which matrix products are taken.
      wide: dtype of the sums.

    Returns:
      ``wide`` [batch, num_kv_heads, group, v_dim].
    """
    if sources.scales is not None:
        factors = jnp.where(seen[:, None], read_scales(sources, blocks, 1), 0).astype(wide)
        weights = weights * factors[:, :, None]

    def by_dot(weights: jax.Array, seen: jax.Array, sources: Sources, blocks: jax.Array) -> jax.Array:
        v = read_heads(sources, blocks, options.v_offset, options.v_dim).astype(narrow)
        v = jnp.where(seen[:, None, :, None], v, 0)
        weights = weights.astype(narrow)
        return jnp.einsum("bhgs,bhsd->bhgd", weights, v, precision="highest", preferred_element_type=wide)

    def fused(weights: jax.Array, seen: jax.Array, sources: Sources, blocks: jax.Array) -> jax.Array:
        v = read_heads(sources, blocks, options.v_offset, options.v_dim).astype(wide)
        v = jnp.where(seen[:, None, :, None], v, 0)
        v = v.reshape(*v.shape[:2], -1, TERMS, v.shape[-1])
        parts = weights.reshape(*weights.shape[:3], -1, TERMS, 1)
        sums = _sums([parts[:, :, g] * v for g in range(weights.shape[2])], axis=3)
        return jnp.stack([x.sum(axis=2) for x in sums], axis=2)

    fits = weights.shape[2] <= MAX_GROUP and sources.block_size % TERMS == 0
    return _choose(fused, by_dot, fits, weights, seen, sources, blocks)


def _choose(fused, by_dot, fits: bool, *arguments) -> jax.Array:  # type: ignore[no-untyped-def]
    """The fused form on CPUs where it fits; matrix products elsewhere."""
    if not fits:
        return by_dot(*arguments)
    return lax.platform_dependent(*arguments, cpu=fused, default=by_dot)


def _sums(terms: list[jax.Array], axis: int) -> list[jax.Array]:
    """Sums several arrays along an axis in one reduction."""
    zeros = tuple(jnp.zeros((), x.dtype) for x in terms)

    def add(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(x + y for x, y in zip(a, b, strict=True))

    return list(lax.reduce(tuple(terms), zeros, add, (axis,)))
