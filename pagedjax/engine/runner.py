"""The runner: owns the device state, compiles steps and dispatches them.

It turns a scheduled step into one packed buffer, picks the bucket, and calls the compiled program. Dispatch is
asynchronous: what comes back is a handle that the engine reads one step late.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from flax import nnx

from pagedjax.engine import state as state_module
from pagedjax.engine.buckets import Bucket, Buckets
from pagedjax.engine.packing import Layout
from pagedjax.engine.request import Sequence
from pagedjax.engine.scheduler import ScheduledStep
from pagedjax.engine.state import EngineState, deltas_layout, empty_state, step_layout
from pagedjax.engine.step import StepOutput, StepProgram, jit_apply, jit_step
from pagedjax.paged.attention import Placement
from pagedjax.paged.pages import PagesSpec


@dataclass
class RunnerStats:
    """Counters since the engine started; times in seconds.

    Attributes:
        num_compilations: programs compiled or loaded from the persistent cache.
        compile_s: time that took.
        num_steps: steps dispatched.
        num_copies: block copies done by the device.
    """

    num_compilations: int = 0
    compile_s: float = 0.0
    num_steps: int = 0
    num_copies: int = 0


@dataclass
class Runner:
    """Compiles and dispatches steps.

    Args:
        model: an NNX model, ``(tokens, positions) -> hidden`` with ``head(hidden) -> logits``.
        spec: layout of the pages.
        placement: devices of the pages.
        buckets: shapes of the steps.
        max_blocks: blocks of a row at most.
    """

    model: nnx.Module
    spec: PagesSpec
    placement: Placement
    buckets: Buckets
    max_blocks: int
    stats: RunnerStats = field(default_factory=RunnerStats)

    def __post_init__(self) -> None:
        graphdef, params = nnx.split(self.model)
        self.params, params_tree = jax.tree.flatten(params)
        self.program = StepProgram(graphdef, params_tree, self.spec, self.placement)
        self.state = self.new_state()
        self._steps: dict[Bucket, Callable[..., Any]] = {}
        self._layouts: dict[Bucket, Layout] = {}
        self._apply: Callable[..., Any] | None = None
        self._deltas = deltas_layout()

    def new_state(self) -> EngineState:
        """Fresh state with zeroed pages."""
        return empty_state(
            self.spec.allocate(self.placement.mesh),
            groups=self.spec.num_groups,
            rows=self.buckets.max_rows,
            max_blocks=self.max_blocks,
        )

    # Compilation

    def compile_step(self, bucket: Bucket) -> Any:
        """The compiled program of a bucket; compiled at the first call."""
        if bucket not in self._steps:
            layout = self._layouts[bucket] = step_layout(bucket)
            packed = jax.ShapeDtypeStruct((layout.size,), np.int32)
            self._steps[bucket] = self._compile(jit_step(self.program, bucket), self.params, self.state, packed)
        return self._steps[bucket]

    def compile_apply(self) -> Any:
        """The compiled program that only applies changes."""
        if self._apply is None:
            packed = jax.ShapeDtypeStruct((self._deltas.size,), np.int32)
            self._apply = self._compile(jit_apply(self.program), self.state, packed)
        return self._apply

    def _compile(self, function: Any, *args: Any) -> Any:
        start = time.perf_counter()
        compiled = function.lower(*args).compile()
        self.stats.num_compilations += 1
        self.stats.compile_s += time.perf_counter() - start
        return compiled

    # Dispatch

    def bucket_of(self, step: ScheduledStep) -> Bucket:
        """The bucket that a step fits into."""
        return self.buckets.pick(
            decodes=len(step.decodes),
            prefill_tokens=step.num_prefill_tokens,
            prefills=len(step.prefills),
            samples=step.num_samples,
        )

    def must_compile(self, step: ScheduledStep) -> bool:
        """Whether the step's bucket was never compiled."""
        return self.bucket_of(step) not in self._steps

    def dispatch(self, step: ScheduledStep) -> tuple[StepOutput, np.ndarray]:
        """Starts a step on the device.

        Returns:
            Its output, not read yet, and the places of the step's samples in it, int32 ``[samples]``.
        """
        bucket = self.bucket_of(step)
        program = self.compile_step(bucket)
        layout = self._layouts[bucket]
        packed = layout.empty()
        self._pack_deltas(layout, packed, step)
        places = self._pack_batch(layout, packed, step, bucket)
        self.state, output = program(self.params, self.state, packed)
        self.stats.num_steps += 1
        return output, places

    def _pack_deltas(self, layout: Layout, packed: np.ndarray, step: ScheduledStep) -> None:
        """Puts the changes into `packed`; what does not fit is applied by calls of its own, now."""
        copies, updates, setups = step.copies, step.table_updates, step.new_rows
        self.stats.num_copies += len(copies)
        limits = (state_module.MAX_COPIES, state_module.MAX_TABLE_UPDATES, state_module.MAX_ROW_SETUPS)
        while len(copies) > limits[0] or len(updates) > limits[1] or len(setups) > limits[2]:
            buffer = self._deltas.empty()
            _fill_deltas(self._deltas, buffer, copies[: limits[0]], updates[: limits[1]], setups[: limits[2]])
            copies, updates, setups = copies[limits[0] :], updates[limits[1] :], setups[limits[2] :]
            self.state = self.compile_apply()(self.state, buffer)
        _fill_deltas(layout, packed, copies, updates, setups)

    def _pack_batch(self, layout: Layout, packed: np.ndarray, step: ScheduledStep, bucket: Bucket) -> np.ndarray:
        count, room = len(step.decodes), bucket.num_decodes
        row_ids, query_lens = layout.view(packed, "row_ids"), layout.view(packed, "query_lens")
        sample_row = layout.view(packed, "sample_row")
        row_ids[:count] = step.decode_rows
        query_lens[:count] = 1
        sample_row[:count] = step.decode_rows
        if not bucket.num_prefills:
            return np.arange(count, dtype=np.int32)

        tokens, position = layout.view(packed, "prefill_tokens"), 0
        for place, chunk in enumerate(step.prefills, start=room):
            size = len(chunk.token_ids)
            row_ids[place], query_lens[place] = chunk.sequence.row, size
            tokens[position : position + size] = chunk.token_ids
            position += size
        sample_source = layout.view(packed, "sample_source")
        sample_source[:count] = np.arange(count)
        extra = step.samples[count:]
        for place, (sequence, source) in enumerate(zip(extra, step.sample_sources[count:], strict=True), start=room):
            sample_row[place], sample_source[place] = sequence.row, room + source - count
        return np.concatenate([np.arange(count), room + np.arange(len(extra))]).astype(np.int32)


def _fill_deltas(
    layout: Layout,
    packed: np.ndarray,
    copies: np.ndarray,
    updates: np.ndarray,
    setups: list[tuple[Sequence, int]],
) -> None:
    if len(copies):
        layout.view(packed, "num_copies")[...] = len(copies)
        layout.view(packed, "copies")[: len(copies)] = copies
    if len(updates):
        layout.view(packed, "table_updates")[: len(updates)] = updates
    if setups:
        rows = layout.view(packed, "setup_rows")
        ints, floats = layout.view(packed, "setup_ints"), layout.view(packed, "setup_floats")
        for i, (sequence, num_tokens) in enumerate(setups):
            params, request = sequence.request.params, sequence.request
            rows[i] = sequence.row
            seed = np.uint32(request.seed).view(np.int32)
            ints[i] = (num_tokens, 0, params.top_k, seed, sequence.index)
            floats[i] = (params.temperature, params.top_p, params.min_p)
