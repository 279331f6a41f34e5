"""Writes of new keys and values into pages, in place when the pages are donated.

The idea that makes it work: pages are seen as flat rows ``[num_blocks * num_kv_heads * block_size, width]``, and one
scatter replaces whole rows. XLA updates that form in place, also inside a scan; an update indexed by block and offset
with all heads between them makes it copy the pool in and out.
"""

import jax
import jax.numpy as jnp
from jax import lax

INT32_MAX = 2**31 - 1


def write_kv(
    pages: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    slots: jax.Array,
    *,
    v_offset: int | None = None,
    block_offset: jax.Array | int = 0,
) -> jax.Array:
    """Writes one row of lanes for every token and head.

    Args:
      pages: [num_blocks, num_kv_heads, block_size, width]; donate it, and it is updated in place.
      k: [tokens, num_kv_heads, k_dim], converted to the dtype of the pages; goes to lanes [0, k_dim).
      v: [tokens, num_kv_heads, v_dim]; goes to lanes [v_offset, v_offset + v_dim). None, or lanes that end within
        K's, where V is a part of K (MLA): then only K is written.
      slots: int32 [tokens], distinct: block * block_size + offset. Negative ones, and those past the last block, are
        dropped: padding.
      v_offset: where V begins in a page's row of lanes; None is k_dim.
      block_offset: int32 scalar, added to every block: where a layer begins in stacked pages.

    Returns:
      pages, with the same shape and dtype.

    Raises:
      ValueError: shapes that do not fit each other, or pages of 2**31 rows or more.
    """
    _, num_kv_heads, _, width = pages.shape
    k_dim = k.shape[-1]
    if k.shape[1] != num_kv_heads or k_dim > width:
        raise ValueError(f"k of shape {k.shape} does not fit pages of shape {pages.shape}")
    rows = _flat_rows(pages.shape, slots, block_offset)
    v_offset = k_dim if v_offset is None else v_offset
    if v is None or v_offset + v.shape[-1] <= k_dim:
        return _set_lanes(pages, rows, k, 0)
    if v.shape[:2] != k.shape[:2] or v_offset + v.shape[-1] > width:
        raise ValueError(f"v of shape {v.shape} at lane {v_offset} does not fit pages of shape {pages.shape}")
    if v_offset == k_dim:
        return _set_lanes(pages, rows, jnp.concatenate([k.astype(pages.dtype), v.astype(pages.dtype)], axis=-1), 0)
    return _set_lanes(_set_lanes(pages, rows, k, 0), rows, v, v_offset)


def quantize(x: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Rounds vectors to 8 bits with one scale each, so that the largest of a vector is the largest of the dtype.

    Args:
      x: [..., dim].
      dtype: int8 or an 8-bit float.

    Returns:
      values [..., dim] of ``dtype`` and scales float32 [...]; x is about values * scales.
    """
    integer = jnp.issubdtype(dtype, jnp.integer)
    limit = float(jnp.iinfo(dtype).max) if integer else float(jnp.finfo(dtype).max)
    x = x.astype(jnp.float32)
    highest = jnp.max(jnp.abs(x), axis=-1)
    scales = jnp.where(highest > 0, highest / limit, 1.0)
    values = jnp.clip(x / scales[..., None], -limit, limit)
    return (jnp.round(values) if integer else values).astype(dtype), scales


def write_quantized_kv(
    pages: jax.Array,
    scales: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    v_offset: int | None = None,
    block_offset: jax.Array | int = 0,
) -> tuple[jax.Array, jax.Array]:
    """``write_kv`` for 8-bit pages: one scale for every token and head, for K and for V.

    Args:
      pages: [num_blocks, num_kv_heads, block_size, width], int8 or an 8-bit float.
      scales: float32 [num_blocks, num_kv_heads, 2 * block_size], K's then V's.

    The other arguments are those of ``write_kv``.

    Returns:
      pages and scales.
    """
    num_blocks, num_kv_heads, block_size, _ = pages.shape
    if scales.shape != (num_blocks, num_kv_heads, 2 * block_size):
        raise ValueError(f"scales of shape {scales.shape} do not fit pages of shape {pages.shape}")
    k, k_scales = quantize(k, pages.dtype)
    v, v_scales = quantize(v, pages.dtype)
    pages = write_kv(pages, k, v, slots, v_offset=v_offset, block_offset=block_offset)
    rows = _flat_rows(pages.shape, slots, block_offset)
    size = num_blocks * num_kv_heads * block_size
    # row = (block and head) * block_size + offset; K's scale lies at twice the first part, V's block_size after it.
    k_places = rows + rows // block_size * block_size
    places = jnp.concatenate([k_places, k_places + block_size])
    places = jnp.where(jnp.tile(rows, 2) < size, places, 2 * size + jnp.arange(places.size, dtype=jnp.int32))
    new = jnp.concatenate([k_scales.reshape(-1), v_scales.reshape(-1)])
    flat = scales.reshape(-1).at[places].set(new, mode="drop", unique_indices=True)
    return pages, flat.reshape(scales.shape)


def _flat_rows(shape: tuple[int, ...], slots: jax.Array, block_offset: jax.Array | int) -> jax.Array:
    """int32 [tokens * num_kv_heads]: the flat row of each token and head; padding gets distinct ids past the end.

    Never -1, which wraps round in every mode. What is out of range is found before the layer's offset is added.
    """
    num_blocks, num_kv_heads, block_size, _ = shape
    size = num_blocks * num_kv_heads * block_size
    num_rows = slots.size * num_kv_heads
    if 2 * (size + num_rows) > INT32_MAX:
        raise ValueError(
            f"pages of {size:,} rows (blocks x heads x block_size) need row ids past int32; use fewer blocks"
        )
    block, offset = slots // block_size + block_offset, slots % block_size
    valid = (slots >= 0) & (slots < num_blocks * block_size) & (block < num_blocks)
    rows = (block[:, None] * num_kv_heads + jnp.arange(num_kv_heads, dtype=jnp.int32)) * block_size + offset[:, None]
    beyond = size + jnp.arange(num_rows, dtype=jnp.int32).reshape(rows.shape)
    return jnp.where(valid[:, None], rows, beyond).reshape(-1)


def _set_lanes(pages: jax.Array, rows: jax.Array, x: jax.Array, lane: int) -> jax.Array:
    """Replaces lanes [lane, lane + dim) of flat rows by x: [tokens, num_kv_heads, dim]."""
    width, dim = pages.shape[-1], x.shape[-1]
    flat = pages.reshape(-1, width)
    updates = x.astype(pages.dtype).reshape(-1, dim)
    dimensions = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    places = jnp.stack([rows, jnp.full_like(rows, lane)], axis=-1)
    flat = lax.scatter(flat, places, updates, dimensions, unique_indices=True, mode=lax.GatherScatterMode.FILL_OR_DROP)
    return flat.reshape(pages.shape)
