"""Attention of prefill chunks: tiles of queries, each against the chunks of context that it sees.

A list of tiles is walked in the order of the tokens, with a traced length: sequences of any number and lengths cost
what their own tiles cost. A tile may reach past the end of its sequence; the tiles after it overwrite that.
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
    read_heads,
    read_scales,
)

TILE_TOKENS = 128
CHUNK_TOKENS = 128


def prefill_attention(
    q: jax.Array,
    sources: Sources,
    tables: jax.Array,
    kv_lens: jax.Array,
    query_start: jax.Array,
    options: Options,
) -> jax.Array:
    """Attends with the last tokens of each sequence.

    Args:
      q: [tokens, num_heads, k_dim].
      sources: pages and what belongs to them.
      tables: int32 [batch, max_blocks].
      kv_lens: int32 [batch].
      query_start: int32 [batch + 1], into q.
      options: static.

    Returns:
      [tokens, num_heads, v_dim] in q's dtype; zeros where a token belongs to no sequence.
    """
    num_tokens, num_heads, _ = q.shape
    num_kv_heads, block_size = sources.num_kv_heads, sources.block_size
    group = num_heads // num_kv_heads
    wide, narrow = accumulator_dtype(q), product_dtype(q, sources.pages)
    tile = min(TILE_TOKENS, num_tokens)
    chunk_blocks = min(max(1, CHUNK_TOKENS // block_size), tables.shape[1])

    query_lens = query_start[1:] - query_start[:-1]
    tile_ends = jnp.cumsum((query_lens + tile - 1) // tile)
    padded = jnp.pad(q.astype(narrow), ((0, tile), (0, 0), (0, 0)))
    padded = padded.reshape(num_tokens + tile, num_kv_heads, group, -1)

    def attend_tile(i: jax.Array, outputs: jax.Array) -> jax.Array:
        sequence = jnp.sum(i >= tile_ends, dtype=jnp.int32)
        num_tiles = (query_lens[sequence] + tile - 1) // tile
        inside = (i - (tile_ends[sequence] - num_tiles)) * tile  # first token of the tile within its sequence
        start = query_start[sequence] + inside
        kv_len, table = kv_lens[sequence], tables[sequence]
        first = kv_len - query_lens[sequence] + inside  # position of that token
        end = jnp.minimum(first + tile, kv_len)
        positions = first + jnp.arange(tile, dtype=jnp.int32)
        positions = jnp.where(positions < end, positions, -1)  # sees nothing
        span = blocks_seen(first, end, block_size, options)
        queries = lax.dynamic_slice_in_dim(padded, start, tile).transpose(1, 0, 2, 3)
        queries = queries.reshape(num_kv_heads, tile * group, -1)

        def attend_chunk(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            highest, total, out = carry
            logical = span.logical(j * chunk_blocks + jnp.arange(chunk_blocks, dtype=jnp.int32))
            blocks = jnp.take(table, logical, mode="clip")
            keys = (logical[:, None] * block_size + jnp.arange(block_size, dtype=jnp.int32)).reshape(-1)
            k = read_heads(sources, blocks, 0, options.k_dim).astype(narrow)
            scores = jnp.einsum("hqd,hsd->hqs", queries, k, precision="highest", preferred_element_type=wide)
            scores = scores * options.scale
            if sources.scales is not None:
                scores = scores * read_scales(sources, blocks, 0)[:, None]
            seen = is_visible(positions[:, None, None], keys, options)
            scores = cap(scores, options).reshape(num_kv_heads, tile, group, -1)
            scores = jnp.where(seen, scores, -jnp.inf).reshape(num_kv_heads, tile * group, -1)
            new_highest = jnp.maximum(highest, scores.max(axis=-1))
            safe = jnp.where(new_highest == -jnp.inf, 0, new_highest)
            weights = jnp.exp(scores - safe[..., None])
            shrink = jnp.exp(highest - safe)
            v = read_heads(sources, blocks, options.v_offset, options.v_dim).astype(narrow)
            if sources.scales is not None:
                v = v * read_scales(sources, blocks, 1)[..., None].astype(narrow)
            # What any query of the tile sees was written; the rest may hold anything.
            written = keys < end
            if options.window is not None:
                written &= (keys > first - options.window) | (keys < options.sink_tokens)
            v = jnp.where(written[:, None], v, 0)
            part = jnp.einsum(
                "hqs,hsd->hqd", weights.astype(narrow), v, precision="highest", preferred_element_type=wide
            )
            return new_highest, total * shrink + weights.sum(axis=-1), out * shrink[..., None] + part

        shape = (num_kv_heads, tile * group)
        if sources.sink_logits is None:
            highest, total = jnp.full(shape, -jnp.inf, wide), jnp.zeros(shape, wide)
        else:
            sinks = sources.sink_logits.astype(wide).reshape(num_kv_heads, 1, group)
            highest = jnp.broadcast_to(sinks, (num_kv_heads, tile, group)).reshape(shape)
            total = jnp.ones(shape, wide)
        num_chunks = (span.num_blocks + chunk_blocks - 1) // chunk_blocks
        carry = (highest, total, jnp.zeros((*shape, options.v_dim), wide))
        _, total, out = lax.fori_loop(0, num_chunks, attend_chunk, carry)
        out = (out / jnp.where(total == 0, 1, total)[..., None]).astype(outputs.dtype)
        out = out.reshape(num_kv_heads, tile, group, options.v_dim).transpose(1, 0, 2, 3)
        return lax.dynamic_update_slice_in_dim(outputs, out, start, axis=0)

    outputs = jnp.zeros((num_tokens + tile, num_kv_heads, group, options.v_dim), q.dtype)
    outputs = lax.fori_loop(0, tile_ends[-1], attend_tile, outputs)
    return outputs[:num_tokens].reshape(num_tokens, num_heads, options.v_dim)
