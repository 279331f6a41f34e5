"""What the kernels mean, in float64 NumPy and plain loops: the oracle of the tests, never what serves.

Every function takes the arguments of its namesake in the backends and returns new arrays. A token is looked up one
at a time, through the block table, so nothing that is masked is ever touched.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]


def write_kv(
    pages: ArrayLike,
    k: ArrayLike,
    v: ArrayLike | None,
    slots: ArrayLike,
    *,
    v_offset: int | None = None,
    block_offset: int = 0,
) -> Array:
    """Returns pages with the tokens' keys and values in their slots.

    Args:
      pages: [num_blocks, num_kv_heads, block_size, width].
      k: [tokens, num_kv_heads, k_dim]; goes to lanes [0, k_dim).
      v: [tokens, num_kv_heads, v_dim] or None; goes to lanes [v_offset, v_offset + v_dim).
      slots: int [tokens]; block * block_size + offset. Negative, or beyond the last block: dropped.
      v_offset: where V begins; None is k_dim.
      block_offset: added to every block.
    """
    pages = np.array(pages)
    k = np.asarray(k)
    num_blocks, _, block_size, _ = pages.shape
    for token, slot in enumerate(np.asarray(slots).tolist()):
        block, offset = slot // block_size + int(block_offset), slot % block_size
        if slot < 0 or not 0 <= block < num_blocks:
            continue
        pages[block, :, offset, : k.shape[-1]] = k[token]
        if v is not None:
            v = np.asarray(v)
            start = k.shape[-1] if v_offset is None else v_offset
            pages[block, :, offset, start : start + v.shape[-1]] = v[token]
    return pages


def copy_blocks(pages: ArrayLike, copies: ArrayLike, num_copies: int, *, num_layers: int = 1) -> Array:
    """Returns pages with the first ``num_copies`` pairs (source, destination) copied, in every layer."""
    pages = np.array(pages)
    blocks_per_layer = pages.shape[0] // num_layers
    for source, destination in np.asarray(copies)[: int(num_copies)].tolist():
        for layer in range(num_layers):
            pages[layer * blocks_per_layer + destination] = pages[layer * blocks_per_layer + source]
    return pages


def paged_attention(
    q: ArrayLike,
    pages: ArrayLike,
    block_tables: ArrayLike,
    row_ids: ArrayLike,
    kv_lens: ArrayLike,
    query_start: ArrayLike,
    *,
    num_decodes: int,
    v_dim: int,
    v_offset: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    sink_tokens: int = 0,
    soft_cap: float | None = None,
    sink_logits: ArrayLike | None = None,
    scales: ArrayLike | None = None,
    block_offset: int = 0,
) -> NDArray[np.float64]:
    """Causal attention of a ragged batch over pages, token by token; arguments as in ``kernels.xla.paged_attention``.

    Returns:
      float64 [tokens, num_heads, v_dim]; zeros where a token belongs to no sequence.
    """
    q64 = np.asarray(q).astype(np.float64)
    pages, tables = np.asarray(pages), np.asarray(block_tables)
    rows, lens = np.asarray(row_ids).tolist(), np.asarray(kv_lens).tolist()
    starts: Sequence[int] = np.asarray(query_start).tolist()
    num_tokens, num_heads, k_dim = q64.shape
    _, num_kv_heads, block_size, _ = pages.shape
    v_offset = k_dim if v_offset is None else v_offset
    scale = k_dim**-0.5 if scale is None else scale
    out = np.zeros((num_tokens, num_heads, v_dim))

    for s, (row, kv_len) in enumerate(zip(rows, lens, strict=True)):
        first, last = (s, s + 1) if s < num_decodes else (starts[s], starts[s + 1])
        for token in range(first, last):
            position = kv_len - (last - token)
            if position < 0:
                continue
            seen = [p for p in range(position + 1) if window is None or position - p < window or p < sink_tokens]
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                logits, values = [], []
                for p in seen:
                    block, offset = tables[row, p // block_size] + int(block_offset), p % block_size
                    lanes = pages[block, kv_head, offset].astype(np.float64)
                    key, value = lanes[:k_dim], lanes[v_offset : v_offset + v_dim]
                    if scales is not None:
                        both = np.asarray(scales)[block, kv_head].astype(np.float64)
                        key, value = key * both[offset], value * both[block_size + offset]
                    logit = scale * float(q64[token, head] @ key)
                    logits.append(logit if soft_cap is None else soft_cap * np.tanh(logit / soft_cap))
                    values.append(value)
                sink = [] if sink_logits is None else [float(np.asarray(sink_logits, np.float64)[head])]
                highest = max(logits + sink)
                weights = np.exp(np.array(logits) - highest)
                total = weights.sum() + sum(np.exp(x - highest) for x in sink)
                out[token, head] = weights @ np.array(values) / total
    return out
