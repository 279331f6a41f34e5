"""What an engine keeps on the device, and the layout of what each step ships to it.

`EngineState` is one donated pytree: it goes into every compiled step and comes back updated in place. The host
sends only what changed, in one packed buffer; `apply_deltas` puts it in.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.engine.buckets import Bucket
from pagedjax.engine.packing import Field, Layout
from pagedjax.engine.sampler import RowSampling
from pagedjax.paged.attention import Placement, copy_blocks
from pagedjax.paged.block_tables import update_block_tables

NOWHERE = np.iinfo(np.int32).max  # an index that is out of bounds everywhere: dropped by scatters

MAX_COPIES = 64  # of each kind of delta that one call can carry; more go in calls of their own
MAX_TABLE_UPDATES = 256
MAX_ROW_SETUPS = 32

ROW_INTS = ("context_len", "last_token", "top_k", "seed", "sample_index")
ROW_FLOATS = ("temperature", "top_p", "min_p")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngineState:
    """State that stays on the device.

    Attributes:
        pages: arrays ``[num_blocks, physical_heads, block_size, width]``.
        block_tables: int32 ``[groups, rows, max_blocks]``.
        context_lens: int32 ``[rows]``, tokens of each row whose KV is in the pages.
        last_tokens: int32 ``[rows]``, the token that each row decodes next.
        sampling: parameters of each row.
    """

    pages: tuple[jax.Array, ...]
    block_tables: jax.Array
    context_lens: jax.Array
    last_tokens: jax.Array
    sampling: RowSampling


def empty_state(pages: tuple[jax.Array, ...], *, groups: int, rows: int, max_blocks: int) -> EngineState:
    """A state without sequences."""
    ints, floats = jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.float32)
    sampling = RowSampling(floats, ints, floats + 1, floats + 0, ints + 0, ints + 0)
    return EngineState(pages, jnp.zeros((groups, rows, max_blocks), jnp.int32), ints + 0, ints + 0, sampling)


def deltas_fields() -> dict[str, Field]:
    """Changes that any call can carry: block copies, block-table entries, rows set up for a sequence."""
    return {
        "num_copies": Field(()),
        "copies": Field((MAX_COPIES, 2), fill=NOWHERE),
        "table_updates": Field((MAX_TABLE_UPDATES, 4), fill=NOWHERE),
        "setup_rows": Field((MAX_ROW_SETUPS,), fill=NOWHERE),
        "setup_ints": Field((MAX_ROW_SETUPS, len(ROW_INTS))),
        "setup_floats": Field((MAX_ROW_SETUPS, len(ROW_FLOATS)), is_float=True),
    }


def deltas_layout() -> Layout:
    """Layout of a call that only applies changes."""
    return Layout(deltas_fields())


def step_layout(bucket: Bucket) -> Layout:
    """Layout of a step of the given bucket: the changes, then the batch.

    ``sample_source`` indexes the logits rows of the step (decode rows, then the last token of each prefill
    chunk), ``sample_row`` is the row that the drawn token belongs to.
    """
    return Layout(
        deltas_fields()
        | {
            "row_ids": Field((bucket.num_sequences,), fill=NOWHERE),
            "query_lens": Field((bucket.num_sequences,)),
            "prefill_tokens": Field((bucket.num_prefill_tokens,)),
            "sample_source": Field((bucket.num_samples,)),
            "sample_row": Field((bucket.num_samples,), fill=NOWHERE),
        }
    )


def apply_deltas(state: EngineState, deltas: dict[str, jax.Array], placement: Placement) -> EngineState:
    """Copies blocks, then updates tables and rows. Copies come before any write of the step."""
    pages = copy_blocks(state.pages, deltas["copies"], deltas["num_copies"], placement=placement)
    rows = deltas["setup_rows"]
    values = {name: deltas["setup_ints"][:, i] for i, name in enumerate(ROW_INTS)}
    values |= {name: deltas["setup_floats"][:, i] for i, name in enumerate(ROW_FLOATS)}

    def put(array: jax.Array, name: str) -> jax.Array:
        return array.at[rows].set(values[name], mode="drop")

    old = state.sampling
    return EngineState(
        pages=pages,
        block_tables=update_block_tables(state.block_tables, deltas["table_updates"]),
        context_lens=put(state.context_lens, "context_len"),
        last_tokens=put(state.last_tokens, "last_token"),
        sampling=RowSampling(
            temperature=put(old.temperature, "temperature"),
            top_k=put(old.top_k, "top_k"),
            top_p=put(old.top_p, "top_p"),
            min_p=put(old.min_p, "min_p"),
            seed=put(old.seed, "seed"),
            sample_index=put(old.sample_index, "sample_index"),
        ),
    )
