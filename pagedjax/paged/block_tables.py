"""Block tables on the device, and the batch that one compiled step attends with.

A block table is an immutable ``int32`` array; the host never sends it whole. It sends the entries that changed,
and the step applies them functionally. From tables and lengths the step itself derives where new tokens are
written and what each sequence may read, so that a scan over several decode steps needs nothing from the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax


def update_block_tables(block_tables: jax.Array, updates: jax.Array) -> jax.Array:
    """Sets entries of the block tables.

    Args:
        block_tables: int32 ``[groups, rows, max_blocks]``.
        updates: int32 ``[n, 4]`` of (group, row, index, block id), as `KVCacheManager.take_table_updates` gives
            them. Entries out of bounds are padding and dropped.
    """
    group, row, index, block = updates.T
    return block_tables.at[group, row, index].set(block, mode="drop")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """The sequences and the tokens of one step; a pytree, made inside the step by `make_batch`.

    Tokens are flat: one token for each of the first ``num_decodes`` sequences, then the prefill chunks one
    after another. Padding sequences have ``kv_lens`` 0.

    Attributes:
        row_ids: int32 ``[batch]``, the row of each sequence.
        block_tables: int32 ``[groups, rows, max_blocks]``.
        kv_lens: int32 ``[batch]``, tokens each sequence attends to, this step's own included.
        query_start: int32 ``[batch + 1]``, first token of each sequence.
        slots: int32 ``[groups, tokens]``, where each token's K and V go: ``block * block_size + offset``, or
            out of range where there is nothing to write.
        num_decodes: sequences at the front that have one token each.
    """

    row_ids: jax.Array
    block_tables: jax.Array
    kv_lens: jax.Array
    query_start: jax.Array
    slots: jax.Array
    num_decodes: int = field(metadata={"static": True})


def make_batch(
    block_tables: jax.Array,
    context_lens: jax.Array,
    row_ids: jax.Array,
    query_lens: jax.Array,
    *,
    num_decodes: int,
    num_tokens: int,
    num_blocks: int,
    block_size: int,
) -> tuple[Batch, jax.Array]:
    """Derives the batch of a step from the state on the device.

    Args:
        block_tables: int32 ``[groups, rows, max_blocks]``, this step's updates applied.
        context_lens: int32 ``[rows]``, tokens of each row already in the pages.
        row_ids: int32 ``[batch]``; out of range for padding.
        query_lens: int32 ``[batch]``, new tokens of each sequence; 0 for padding, 0 or 1 in the first `num_decodes`.
        num_decodes: static; token ``i < num_decodes`` belongs to sequence ``i``.
        num_tokens: static; tokens of the step, padding included.

    Returns:
        The batch, and int32 ``[num_tokens]`` positions in their sequences (0 for padding).
    """
    rows = context_lens.shape[0]
    real = (query_lens > 0) & (row_ids >= 0) & (row_ids < rows)
    row = jnp.where(real, row_ids, 0)
    before = jnp.where(real, context_lens[row], 0)
    query_lens = jnp.where(real, query_lens, 0)
    batch = row_ids.shape[0]

    places = jnp.ones(num_decodes, jnp.int32)  # a padding decode row keeps its token's place
    occupied = jnp.concatenate([places, query_lens[num_decodes:]])
    query_start = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(occupied, dtype=jnp.int32)])

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    sequence = jnp.sum(token[:, None] >= query_start[None, 1:], axis=1, dtype=jnp.int32)
    inside = sequence < batch
    sequence = jnp.minimum(sequence, batch - 1)
    inside &= real[sequence]
    positions = jnp.where(inside, before[sequence] + token - query_start[sequence], 0)
    blocks = block_tables[:, row[sequence], positions // block_size]  # [groups, tokens]
    nowhere = num_blocks * block_size + token  # distinct and out of range
    slots = jnp.where(inside & (blocks > 0), blocks * block_size + positions % block_size, nowhere)
    kv_lens = jnp.where(real, before + query_lens, 0)
    return Batch(row, block_tables, kv_lens, query_start, slots, num_decodes), positions


def last_tokens_of(batch: Batch) -> jax.Array:
    """int32 ``[batch]``: index of the last token of each sequence (0 for padding): the rows whose logits matter."""
    return jnp.maximum(lax.slice_in_dim(batch.query_start, 1, None) - 1, 0)
