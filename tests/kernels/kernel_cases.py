"""Random ragged batches whose pages are full of NaN wherever nothing was written."""

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclass
class Case:
    """Arguments of ``paged_attention``, as NumPy arrays."""

    q: np.ndarray
    pages: np.ndarray
    block_tables: np.ndarray
    row_ids: np.ndarray
    kv_lens: np.ndarray
    query_start: np.ndarray
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> tuple[np.ndarray, ...]:
        return self.q, self.pages, self.block_tables, self.row_ids, self.kv_lens, self.query_start


def _empty_pages(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    if jnp.issubdtype(dtype, jnp.integer):
        return np.full(shape, jnp.iinfo(dtype).max, dtype)
    return np.full(shape, np.nan).astype(dtype)


def make_case(
    seed: int,
    decodes: list[int],
    chunks: list[tuple[int, int]] = [],  # noqa: B006
    *,
    block_size: int = 16,
    heads: tuple[int, int] = (6, 2),
    k_dim: int = 8,
    v_dim: int = 8,
    v_offset: int | None = None,
    width: int | None = None,
    dtype: Any = np.float32,
    pages_dtype: Any = None,
    padding_tokens: int = 0,
    layers: int = 1,
    layer: int = 0,
    **options: Any,
) -> Case:
    """A batch of ``decodes`` (kv_len each) and ``chunks`` (query_len, kv_len each); a length of 0 is padding.

    Only what the sequences see is written: block 0, unused blocks, other layers and the ends of blocks hold NaN (or
    the largest integer), scales too, and so do queries of padding.
    """
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads = heads
    pages_dtype = dtype if pages_dtype is None else pages_dtype
    kv_lens = np.array([*decodes, *(kv for _, kv in chunks)], np.int32)
    query_lens = np.array([*(1 for _ in decodes), *(n for n, _ in chunks)], np.int32)
    query_start = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    num_tokens = int(query_start[-1]) + padding_tokens
    batch = len(kv_lens)
    needed = [-(-int(n) // block_size) for n in kv_lens]
    max_blocks = max([*needed, 1]) + 2
    num_rows = batch + 2
    num_blocks = sum(needed) + 4
    v_start = k_dim if v_offset is None else v_offset
    width = max(k_dim, v_start + v_dim) if width is None else width

    pages = _empty_pages((layers * num_blocks, num_kv_heads, block_size, width), pages_dtype)
    one_byte = np.dtype(pages_dtype).itemsize == 1
    scales = np.full((layers * num_blocks, num_kv_heads, 2 * block_size), np.nan, np.float32) if one_byte else None
    free = iter(rng.permutation(np.arange(1, num_blocks)).tolist())
    block_tables = np.zeros((num_rows, max_blocks), np.int32)
    row_ids = rng.permutation(num_rows)[:batch].astype(np.int32)
    for row, kv_len, count, query_len in zip(row_ids, kv_lens, needed, query_lens, strict=True):
        block_tables[row, :count] = [next(free) for _ in range(count)]
        window, sinks = options.get("window"), options.get("sink_tokens", 0)
        for position in range(kv_len):
            if window is not None and position <= kv_len - query_len - window and position >= sinks:
                if (position + 1) % block_size == 0 and position // block_size * block_size >= sinks:
                    block_tables[row, position // block_size] = 0  # freed: no query sees any of it
                continue
            block, offset = layer * num_blocks + block_tables[row, position // block_size], position % block_size
            lanes = rng.normal(size=(num_kv_heads, width)) * (60 if one_byte else 1)
            pages[block, :, offset] = lanes.astype(pages_dtype)
            if scales is not None:
                scales[block, :, offset] = rng.uniform(0.01, 0.02, num_kv_heads)
                scales[block, :, block_size + offset] = rng.uniform(0.01, 0.02, num_kv_heads)
    q = rng.normal(size=(num_tokens, num_heads, k_dim)).astype(dtype)
    q[query_start[-1] :] = np.nan
    for i, kv_len in enumerate(decodes):
        if kv_len == 0:
            q[i] = np.nan
    options |= {"num_decodes": len(decodes), "v_dim": v_dim, "v_offset": v_offset, "block_offset": layer * num_blocks}
    if scales is not None:
        options["scales"] = scales
    return Case(q, pages, block_tables, row_ids, kv_lens, query_start, options)
