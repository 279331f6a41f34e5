"""The compiled step: copy blocks, update tables, run the model through the cache, sample.

One function serves every bucket; what differs between buckets are static shapes. State is donated and comes
back updated in place; what the host reads later is a separate output and never part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.engine.buckets import Bucket
from pagedjax.engine.sampler import sample
from pagedjax.engine.state import EngineState, apply_deltas, deltas_layout, step_layout
from pagedjax.nnx import attach, detach
from pagedjax.paged.attention import Placement
from pagedjax.paged.block_tables import last_tokens_of, make_batch
from pagedjax.paged.pages import PagesSpec


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What the host reads one step late.

    Attributes:
        token_ids: int32 ``[samples]``, the drawn tokens.
    """

    token_ids: jax.Array


@dataclass(frozen=True)
class StepProgram:
    """What all steps of an engine have in common; static.

    Attributes:
        graphdef: the model without its parameters.
        params_tree: the structure of the parameters; steps take their leaves, which costs less at each call.
        spec: layout of the pages.
        placement: devices of the pages.
    """

    graphdef: Any
    params_tree: Any
    spec: PagesSpec
    placement: Placement

    def apply_only(self, state: EngineState, packed: jax.Array) -> EngineState:
        """Applies changes without running the model: what does not fit into a step goes this way before it."""
        return apply_deltas(state, deltas_layout().unpack(packed), self.placement)

    def step(
        self, params: Sequence[jax.Array], state: EngineState, packed: jax.Array, *, bucket: Bucket
    ) -> tuple[EngineState, StepOutput]:
        """One step of a bucket.

        Args:
            params: leaves of the model's parameters, not donated.
            state: donated.
            packed: int32, in the layout of `step_layout(bucket)`.
        """
        fields = step_layout(bucket).unpack(packed)
        state = apply_deltas(state, fields, self.placement)
        state, hidden_rows, head = self._forward(params, state, fields, bucket)
        logits = head(hidden_rows[None])[0].astype(jnp.float32)  # [sequences, vocabulary]

        rows = fields["sample_row"]
        inside = jnp.minimum(rows, state.last_tokens.shape[0] - 1)  # padding samples are dropped below
        source = fields["sample_source"]
        wanted = logits[source] if bucket.num_prefills else logits
        drawn = sample(wanted, state.sampling.take(inside), state.context_lens[inside])
        state = EngineState(
            state.pages,
            state.block_tables,
            state.context_lens,
            state.last_tokens.at[rows].set(drawn, mode="drop"),
            state.sampling,
        )
        return state, StepOutput(drawn)

    def _forward(
        self, params: Sequence[jax.Array], state: EngineState, fields: dict[str, jax.Array], bucket: Bucket
    ) -> tuple[EngineState, jax.Array, Any]:
        """Runs the model; returns the state with this step's KV, and the hidden rows whose logits are wanted."""
        rows = state.last_tokens.shape[0]
        row_ids, query_lens = fields["row_ids"], fields["query_lens"]
        batch, positions = make_batch(
            state.block_tables,
            state.context_lens,
            row_ids,
            query_lens,
            num_decodes=bucket.num_decodes,
            num_tokens=bucket.num_tokens,
            num_blocks=self.spec.num_blocks,
            block_size=self.spec.block_size,
        )
        decode_tokens = state.last_tokens[jnp.minimum(row_ids[: bucket.num_decodes], rows - 1)]
        tokens = jnp.concatenate([decode_tokens, fields["prefill_tokens"]])

        model = nnx.merge(self.graphdef, jax.tree.unflatten(self.params_tree, params))
        attach(model, state.pages, batch, spec=self.spec, placement=self.placement)
        hidden = model(tokens[None], positions[None])[0]
        pages = detach(model, self.spec)
        if bucket.num_prefills:
            hidden = hidden[last_tokens_of(batch)]
        context_lens = state.context_lens.at[row_ids].add(query_lens, mode="drop")
        state = EngineState(pages, state.block_tables, context_lens, state.last_tokens, state.sampling)
        return state, hidden, model.head


def jit_step(program: StepProgram, bucket: Bucket) -> Any:
    """The jitted step of a bucket: ``(params, state, packed) -> (state, output)``, state donated."""

    def step(params: Sequence[jax.Array], state: EngineState, packed: jax.Array) -> tuple[EngineState, StepOutput]:
        return program.step(params, state, packed, bucket=bucket)

    return jax.jit(step, donate_argnums=1)


def jit_apply(program: StepProgram) -> Any:
    """The jitted application of changes: ``(state, packed) -> state``, state donated."""
    return jax.jit(program.apply_only, donate_argnums=0)
