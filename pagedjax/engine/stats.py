"""What an engine counts, in one immutable record."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedjax.engine.engine import Engine


@dataclass
class Meter:
    """Time and tokens of the steps that were read; steps that prefill anything are counted apart."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_decode_step_tokens: int = 0
    num_generated_tokens: int = 0
    peak_held_blocks: int = 0
    peak_shared_blocks: int = 0
    peak_rows: int = 0
    num_finished: int = 0


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine started, and the pool as it is now.

    Attributes:
        num_requests_finished: requests that ended, aborted ones included.
        num_waiting: sequences that wait for a row.
        num_running: sequences that have a row.
        num_prompt_tokens: prompt tokens of the admitted requests.
        num_cached_tokens: those of them whose KV was in the cache: prefix hits.
        num_computed_prefill_tokens: tokens that prefill steps computed, recomputed ones included.
        num_generated_tokens: tokens drawn and read.
        prefill_tokens_per_s: computed prefill tokens over the time of the steps that prefill.
        decode_tokens_per_s: tokens of pure decode steps over their time.
        num_preemptions: times a sequence lost its row for want of blocks.
        num_forks: sequences that started from another's blocks.
        num_copies: copy-on-write block copies done by the device.
        peak_shared_blocks: most blocks that several sequences owned at once.
        peak_held_blocks: most blocks held by sequences at once.
        peak_rows: most sequences that ran at once.
        num_blocks: blocks of the pool, the null block included.
        block_size: tokens in a block.
        block_bytes: bytes of a block over all layers, read off the arrays on the device.
        peak_held_bytes: ``peak_held_blocks`` in bytes.
        contiguous_bytes: what a contiguous cache reserves for ``peak_rows`` sequences of ``max_len`` tokens.
        num_compilations: programs compiled, or loaded from the persistent cache.
        compile_s: time that took.
        num_steps: steps dispatched.
    """

    num_requests_finished: int
    num_waiting: int
    num_running: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_prefill_tokens: int
    num_generated_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    num_preemptions: int
    num_forks: int
    num_copies: int
    peak_shared_blocks: int
    peak_held_blocks: int
    peak_rows: int
    num_blocks: int
    block_size: int
    block_bytes: int
    peak_held_bytes: int
    contiguous_bytes: int
    num_compilations: int
    compile_s: float
    num_steps: int

    @classmethod
    def collect(cls, engine: Engine) -> EngineStats:
        """Reads the counters of an engine."""
        meter, runner, scheduler = engine.meter, engine.runner, engine.scheduler
        spec = runner.spec
        block_bytes = sum(array.nbytes for array in runner.state.pages) // spec.num_blocks
        return cls(
            num_requests_finished=meter.num_finished,
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            num_prompt_tokens=scheduler.stats.num_prompt_tokens,
            num_cached_tokens=scheduler.stats.num_cached_tokens,
            num_computed_prefill_tokens=scheduler.stats.num_prefill_tokens,
            num_generated_tokens=meter.num_generated_tokens,
            prefill_tokens_per_s=_rate(scheduler.stats.num_prefill_tokens, meter.prefill_s),
            decode_tokens_per_s=_rate(meter.num_decode_step_tokens, meter.decode_s),
            num_preemptions=scheduler.stats.num_preemptions,
            num_forks=scheduler.stats.num_forks,
            num_copies=runner.stats.num_copies,
            peak_shared_blocks=meter.peak_shared_blocks,
            peak_held_blocks=meter.peak_held_blocks,
            peak_rows=meter.peak_rows,
            num_blocks=spec.num_blocks,
            block_size=spec.block_size,
            block_bytes=block_bytes,
            peak_held_bytes=meter.peak_held_blocks * block_bytes,
            contiguous_bytes=meter.peak_rows * engine.max_len * block_bytes // spec.block_size,
            num_compilations=runner.stats.num_compilations,
            compile_s=runner.stats.compile_s,
            num_steps=runner.stats.num_steps,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
