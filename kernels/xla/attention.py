"""Attention of a ragged batch through block tables: the front door, which splits decodes from prefill chunks.

Lengths are data: every loop over the context has a traced bound, so one compiled program serves all lengths. What is
masked is replaced before it is used as a number, in V too (0 x NaN is NaN), so pages may hold anything where nothing
was written.
"""

import jax
import jax.numpy as jnp

from pagedjax.kernels.xla.decode import decode_attention
from pagedjax.kernels.xla.options import Options, Sources
from pagedjax.kernels.xla.prefill import prefill_attention


def paged_attention(
    q: jax.Array,
    pages: jax.Array,
    block_tables: jax.Array,
    row_ids: jax.Array,
    kv_lens: jax.Array,
    query_start: jax.Array,
    *,
    num_decodes: int,
    v_dim: int,
    v_offset: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    sink_tokens: int = 0,
    soft_cap: float | None = None,
    sink_logits: jax.Array | None = None,
    scales: jax.Array | None = None,
    block_offset: jax.Array | int = 0,
) -> jax.Array:
    """Causal attention of each sequence's last tokens to its keys and values in the pages.

    float32 is computed at precision HIGHEST and the softmax in float32, or in float64 where q is float64.

    Args:
      q: [tokens, num_heads, k_dim].
      pages: [num_blocks, num_kv_heads, block_size, width]: K in lanes [0, k_dim), V in [v_offset, v_offset + v_dim).
        This step's own keys and values are already written.
      block_tables: int32 [rows, max_blocks].
      row_ids: int32 [batch]: the row of each sequence of the batch.
      kv_lens: int32 [batch]: tokens that each sequence attends to, this step's own included; 0 is padding.
      query_start: int32 [batch + 1]: sequence s has the tokens query_start[s]:query_start[s + 1], the last ones of its
        kv_lens[s]. Tokens from query_start[batch] on are padding.
      num_decodes: static: the first sequences, with one token each; token i is that of sequence i.
      v_dim: lanes of a value.
      v_offset: where V begins in a page's row of lanes; None is k_dim. 0 where V is a part of K (MLA).
      scale: factor of the scores; None is k_dim ** -0.5.
      window: tokens that a query sees, itself included; None is all before it.
      sink_tokens: first tokens of a sequence that stay visible under a window.
      soft_cap: scores become soft_cap * tanh(score / soft_cap).
      sink_logits: [num_heads]: one more logit of each head's softmax, with no value.
      scales: float32 [num_blocks, num_kv_heads, 2 * block_size] of 8-bit pages: K's then V's.
      block_offset: int32 scalar, added to every block id: where a layer begins in stacked pages.

    Returns:
      [tokens, num_heads, v_dim] in q's dtype; zeros where a token belongs to no sequence.

    Raises:
      ValueError: shapes that do not fit each other.
    """
    num_tokens, num_heads, k_dim = q.shape
    _, num_kv_heads, block_size, width = pages.shape
    batch = row_ids.shape[0]
    v_offset = k_dim if v_offset is None else v_offset
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads: one must divide the other")
    if k_dim > width or v_offset + v_dim > width:
        raise ValueError(f"K of {k_dim} lanes and V of {v_dim} at lane {v_offset} do not fit pages of width {width}")
    if kv_lens.shape != (batch,) or query_start.shape != (batch + 1,):
        raise ValueError(
            f"{batch} row_ids need as many kv_lens, and one query_start more; got {kv_lens.shape[0]} and "
            f"{query_start.shape[0]}"
        )
    if not 0 <= num_decodes <= min(batch, num_tokens):
        raise ValueError(f"num_decodes is {num_decodes} but the batch has {batch} sequences and {num_tokens} tokens")
    if scales is not None and scales.shape != (*pages.shape[:2], 2 * block_size):
        raise ValueError(f"scales of shape {scales.shape} do not fit pages of shape {pages.shape}")
    options = Options(
        k_dim=k_dim,
        v_dim=v_dim,
        v_offset=v_offset,
        scale=k_dim**-0.5 if scale is None else scale,
        window=window,
        sink_tokens=sink_tokens if window is not None else 0,
        soft_cap=soft_cap,
    )
    sources = Sources(pages, scales, block_offset, sink_logits)
    outputs = []
    if num_decodes:
        tables = block_tables[row_ids[:num_decodes]]
        outputs.append(decode_attention(q[:num_decodes], sources, tables, kv_lens[:num_decodes], options))
    if num_decodes < num_tokens:
        rest = q[num_decodes:]
        if num_decodes == batch:
            outputs.append(jnp.zeros((rest.shape[0], num_heads, v_dim), q.dtype))
        else:
            tables = block_tables[row_ids[num_decodes:]]
            starts = query_start[num_decodes:] - num_decodes
            outputs.append(prefill_attention(rest, sources, tables, kv_lens[num_decodes:], starts, options))
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs)
