"""Attention of one new token a sequence: a loop over chunks of the context, with a running softmax.

All sequences take the loop together, as often as the longest of them needs.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.kernels.xla.options import (
    Options,
    Sources,
    accumulator_dtype,
    blocks_seen,
    cap,
    is_visible,
    product_dtype,
)
from pagedjax.kernels.xla.products import query_scores, weighted_values

CHUNK_TOKENS = 1024  # of all sequences together: what is stored of a chunk should stay in the cache
MIN_CHUNK, MAX_CHUNK = 64, 256  # of each: with few the loop's own cost counts, with many what lies past the end


def decode_attention(
    q: jax.Array, sources: Sources, tables: jax.Array, kv_lens: jax.Array, options: Options
) -> jax.Array:
    """Attends with the last token of each sequence.

    Args:
      q: [batch, num_heads, k_dim].
      sources: pages and what belongs to them.
      tables: int32 [batch, max_blocks].
      kv_lens: int32 [batch].
      options: static.

    Returns:
      [batch, num_heads, v_dim] in q's dtype; zeros where kv_lens is 0.
    """
    batch, num_heads, _ = q.shape
    num_kv_heads, block_size = sources.num_kv_heads, sources.block_size
    group = num_heads // num_kv_heads
    wide, narrow = accumulator_dtype(q), product_dtype(q, sources.pages)
    chunk_tokens = min(max(CHUNK_TOKENS // batch, MIN_CHUNK), MAX_CHUNK)
    chunk_blocks = min(max(1, chunk_tokens // block_size), tables.shape[1])
    dtype = q.dtype
    q = q.reshape(batch, num_kv_heads, group, -1)
    position = kv_lens - 1
    span = blocks_seen(position, kv_lens, block_size, options)

    def attend_chunk(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        highest, total, out = carry
        index = i * chunk_blocks + jnp.arange(chunk_blocks, dtype=jnp.int32)
        logical = jnp.broadcast_to(span.logical(index), (batch, chunk_blocks))
        blocks = jnp.take_along_axis(tables, logical, axis=1, mode="clip")
        keys = (logical[..., None] * block_size + jnp.arange(block_size, dtype=jnp.int32)).reshape(batch, -1)
        seen = is_visible(position[:, None], keys, options)[:, None]

        scores = query_scores(q, sources, blocks, options, narrow, wide) * options.scale
        scores = jnp.where(seen[:, :, None], cap(scores, options), -jnp.inf)
        new_highest = jnp.maximum(highest, scores.max(axis=-1))
        safe = jnp.where(new_highest == -jnp.inf, 0, new_highest)
        weights = jnp.exp(scores - safe[..., None])
        shrink = jnp.exp(highest - safe)
        part = weighted_values(weights, seen[:, 0], sources, blocks, options, narrow, wide)
        return new_highest, total * shrink + weights.sum(axis=-1), out * shrink[..., None] + part

    if sources.sink_logits is None:
        highest = jnp.full((batch, num_kv_heads, group), -jnp.inf, wide)
        total = jnp.zeros_like(highest)
    else:
        sinks = sources.sink_logits.astype(wide).reshape(num_kv_heads, group)
        highest = jnp.broadcast_to(sinks, (batch, num_kv_heads, group))
        total = jnp.ones_like(highest)
    out = jnp.zeros((batch, num_kv_heads, group, options.v_dim), wide)
    num_chunks = (jnp.max(span.num_blocks) + chunk_blocks - 1) // chunk_blocks
    _, total, out = lax.fori_loop(0, num_chunks, attend_chunk, (highest, total, out))
    out = out / jnp.where(total == 0, 1, total)[..., None]
    return out.reshape(batch, num_heads, options.v_dim).astype(dtype)
