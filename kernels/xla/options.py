"""What decode and prefill share: the static options, the arrays they read, and reading whole heads of blocks."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Options:
    """Static options of one attention layer; see ``paged_attention``."""

    k_dim: int
    v_dim: int
    v_offset: int
    scale: float
    window: int | None
    sink_tokens: int
    soft_cap: float | None


class Sources(NamedTuple):
    """The arrays of one layer; see ``paged_attention``."""

    pages: jax.Array
    scales: jax.Array | None
    block_offset: jax.Array | int
    sink_logits: jax.Array | None

    @property
    def num_kv_heads(self) -> int:
        return self.pages.shape[1]

    @property
    def block_size(self) -> int:
        return self.pages.shape[2]


def accumulator_dtype(q: jax.Array) -> jnp.dtype:
    """float64 for float64 queries, else float32."""
    return jnp.promote_types(q.dtype, jnp.float32)


def product_dtype(q: jax.Array, pages: jax.Array) -> jnp.dtype:
    """The dtype in which products are taken: that of q and pages where they agree, else wide enough for both."""
    if pages.dtype.itemsize == 1:
        return q.dtype if q.dtype.itemsize > 1 else jnp.dtype(jnp.float32)
    return jnp.promote_types(q.dtype, pages.dtype)


class Span(NamedTuple):
    """The blocks that some queries see: the first ones (sink tokens), then those from the window on.

    They are numbered without the gap between the two, so that a loop over them visits no block for nothing.
    """

    num_blocks: jax.Array  # blocks seen, int32 [...]
    num_skipped: jax.Array | int  # blocks in the gap, int32 [...]
    num_sinks: int  # blocks before the gap

    def logical(self, index: jax.Array) -> jax.Array:
        """The position in the block table of the ``index``-th block seen (``index``: [..., n])."""
        if isinstance(self.num_skipped, int):
            return index
        return jnp.where(index < self.num_sinks, index, index + self.num_skipped[..., None])


def blocks_seen(first: jax.Array, end: jax.Array, block_size: int, options: Options) -> Span:
    """The span seen by queries of positions from ``first``, to the last of ``end`` tokens; int32 [...] each."""
    num_blocks = (end + block_size - 1) // block_size
    if options.window is None:
        return Span(num_blocks, 0, 0)
    num_sinks = (options.sink_tokens + block_size - 1) // block_size
    lowest = jnp.maximum(first - options.window + 1, 0) // block_size
    skipped = jnp.maximum(lowest - num_sinks, 0)
    return Span(num_blocks - skipped, skipped, num_sinks)


def is_visible(query: jax.Array, key: jax.Array, options: Options) -> jax.Array:
    """Whether the query at a position sees the key at a position; broadcasts."""
    seen = key <= query
    if options.window is not None:
        near = key > query - options.window
        seen &= (near | (key < options.sink_tokens)) if options.sink_tokens else near
    return seen


def cap(scores: jax.Array, options: Options) -> jax.Array:
    """The soft cap, where there is one."""
    return scores if options.soft_cap is None else options.soft_cap * jnp.tanh(scores / options.soft_cap)


def read_heads(sources: Sources, blocks: jax.Array, lane: int, dim: int) -> jax.Array:
    """Lanes of whole blocks, head by head: [..., num_kv_heads, n * block_size, dim] for blocks [..., n].

    Pages are seen as [num_blocks * num_kv_heads, block_size, width]: gathering (block, head) pairs in the order of the
    result moves whole rows; gathering blocks and transposing their heads does not.
    """
    num_blocks, num_kv_heads, block_size, width = sources.pages.shape
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[:, None]
    rows = (blocks + sources.block_offset)[..., None, :] * num_kv_heads + heads
    flat = sources.pages.reshape(num_blocks * num_kv_heads, block_size, width)
    out = lax.platform_dependent(
        flat,
        rows,
        cpu=functools.partial(_gather_lanes, lane=lane, dim=dim),
        default=functools.partial(_gather_whole, lane=lane, dim=dim),
    )
    return out.reshape(*rows.shape[:-1], rows.shape[-1] * block_size, dim)


def _gather_lanes(flat: jax.Array, rows: jax.Array, *, lane: int, dim: int) -> jax.Array:
    """``flat[rows, :, lane : lane + dim]`` as one gather that reads nothing else."""
    starts = jnp.stack([rows, jnp.zeros_like(rows), jnp.full_like(rows, lane)], axis=-1)
    dimensions = lax.GatherDimensionNumbers(
        offset_dims=(rows.ndim, rows.ndim + 1), collapsed_slice_dims=(0,), start_index_map=(0, 1, 2)
    )
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(flat, starts, dimensions, (1, flat.shape[1], dim), mode=mode)


def _gather_whole(flat: jax.Array, rows: jax.Array, *, lane: int, dim: int) -> jax.Array:
    """The same by whole rows: for a gather of some lanes TPU compilers copy all pages into another layout first."""
    return flat.at[rows].get(mode="promise_in_bounds")[..., lane : lane + dim]


def read_scales(sources: Sources, blocks: jax.Array, part: int) -> jax.Array:
    """Scales of K (part 0) or V (part 1) of whole blocks: [..., num_kv_heads, n * block_size]."""
    assert sources.scales is not None
    num_blocks, num_kv_heads, _ = sources.scales.shape
    as_pages = sources.scales.reshape(num_blocks, num_kv_heads, 1, -1)
    out = read_heads(sources._replace(pages=as_pages), blocks, part * sources.block_size, sources.block_size)
    return out.reshape(*out.shape[:-2], -1)
