"""Decides what the next step computes: decode rows first, then prefill chunks, then new requests.

The scheduler asks the cache manager for blocks and never touches the device. When blocks run out it preempts the
sequence that came last: its blocks are given back (what is indexed stays reusable) and it will be recomputed,
ahead of every request that came later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from pagedjax.cache import ExtraKeys, KVCacheManager
from pagedjax.engine.request import Request, Sequence, Status


@dataclass
class PrefillChunk:
    """Tokens ``[start, start + len(token_ids))`` of a sequence, to be computed in a step."""

    sequence: Sequence
    start: int
    token_ids: np.ndarray  # int32
    is_last: bool


@dataclass
class ScheduledStep:
    """What one step computes.

    Attributes:
        decodes: sequences that decode one token each.
        decode_rows: int32, their rows.
        prefills: chunks of prompts.
        new_rows: sequences that got a row in this step, with the tokens that are already in the pages.
        samples: sequences that get a token, in the order of `sample_sources`.
        sample_sources: for each sample the sequence of the step whose logits it is drawn from: its place among
            the decodes, or (counted on from `len(decodes)`) among the prefill chunks.
        copies: int32 ``[n, 2]``, block copies (source, destination) before any write.
        table_updates: int32 ``[n, 4]``, block-table entries that changed.
    """

    decodes: list[Sequence]
    decode_rows: np.ndarray
    prefills: list[PrefillChunk]
    new_rows: list[tuple[Sequence, int]]
    samples: list[Sequence]
    sample_sources: list[int]
    copies: np.ndarray
    table_updates: np.ndarray

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.prefills)

    @property
    def num_samples(self) -> int:
        return len(self.samples)


@dataclass
class SchedulerStats:
    """Counters since the engine started."""

    num_preemptions: int = 0
    num_waits_for_leader: int = 0
    num_prefill_tokens: int = 0
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    num_forks: int = 0


class NeedSettleError(Exception):
    """Blocks ran out while a step is in flight: read its tokens first, some sequence may have ended."""


@dataclass
class Scheduler:
    """First come, first served, within the rows, the blocks and the prefill tokens of a step.

    Args:
        manager: the cache manager.
        max_prefill_tokens: prefill tokens in a step.
        max_prefills: prefill chunks in a step.
    """

    manager: KVCacheManager
    max_prefill_tokens: int
    max_prefills: int
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)  # in the order of their requests
    stats: SchedulerStats = field(default_factory=SchedulerStats)

    def __post_init__(self) -> None:
        self._decodes: list[Sequence] = []
        self._decode_rows = np.zeros(0, np.int32)
        self._decodes_changed = False
        self._preempted_now = False  # in this call of schedule: nobody is admitted on blocks that were just taken away
        self._rows_promised = 0  # rows that forks of running prefills will take

    # What the engine calls

    def add(self, request: Request) -> None:
        """Queues a request that was checked already."""
        first, *rest = request.sequences
        first.forks = list(rest)
        first.prefill_tokens = request.prompt_token_ids
        self.waiting.append(first)

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    def schedule(self, *, in_flight: bool) -> ScheduledStep | None:
        """Chooses the next step and takes its blocks; `None` if there is nothing to compute now.

        Args:
            in_flight: whether a dispatched step was not read yet.

        Raises:
            NeedSettleError: blocks ran out and `in_flight` is true; nothing was scheduled.
        """
        self._preempted_now = False
        while True:
            step = self._try_schedule(in_flight=in_flight)
            if step is not None or in_flight:
                return step
            if not self.running:
                if not self._preempted_now:
                    return None
                self._preempted_now = False  # all blocks are free now: begin again with the first that waits
                continue
            self._preempt(self.running[-1])

    def finish(self, sequence: Sequence, reason: str) -> None:
        """Ends a sequence, wherever it is, and gives its blocks back."""
        forks, sequence.forks = sequence.forks, []
        if sequence.status is Status.WAITING:
            self._forget_waiting(sequence)
        elif sequence.status in (Status.PREFILLING, Status.DECODING):
            self._leave(sequence)
            self._rows_promised -= len(forks)
        sequence.status, sequence.finish_reason = Status.FINISHED, reason
        for fork in forks:  # never started: it ends as its parent did
            self.finish(fork, reason)

    # One attempt

    def _try_schedule(self, *, in_flight: bool) -> ScheduledStep | None:
        decodes, rows = self._grow_decodes(in_flight=in_flight)
        step = ScheduledStep(list(decodes), rows, [], [], list(decodes), list(range(len(decodes))), rows, rows)
        left = self._continue_prefills(step)
        self._admit_waiting(step, left)
        if not step.decodes and not step.prefills:
            return None
        for sequence in step.samples:
            sequence.num_scheduled_outputs += 1
            if not sequence.num_outputs_left:
                self._decodes_changed = True
        step.copies = self.manager.take_copies()
        step.table_updates = self.manager.take_table_updates()
        return step

    def _grow_decodes(self, *, in_flight: bool) -> tuple[list[Sequence], np.ndarray]:
        """Takes a slot for each decoding row, preempting from the end if it must."""
        while True:
            if self._decodes_changed:
                self._decodes = [s for s in self.running if s.status is Status.DECODING and s.num_outputs_left]
                self._decode_rows = np.fromiter((s.row for s in self._decodes), np.int32, len(self._decodes))
                self._decodes_changed = False
            if not self._decodes or self.manager.grow(self._decode_rows, 1):
                return self._decodes, self._decode_rows
            if in_flight:
                raise NeedSettleError
            self._preempt(self.running[-1])

    def _continue_prefills(self, step: ScheduledStep) -> int:
        """Schedules further chunks of prompts that were begun; returns the prefill tokens left."""
        left = self.max_prefill_tokens
        for sequence in [s for s in self.running if s.status is Status.PREFILLING]:
            if not left or len(step.prefills) == self.max_prefills:
                break
            start = int(self.manager.num_scheduled[sequence.row])
            count = min(left, len(self._tokens(sequence)) - start)
            if not self.manager.grow(np.array([sequence.row], np.int32), count):
                break
            self._add_chunk(step, sequence, start, count)
            left -= count
        return left

    def _admit_waiting(self, step: ScheduledStep, left: int) -> None:
        """Admits waiting sequences in order; one whose prefix is being computed is passed over for now."""
        if self._preempted_now:
            return
        passed: list[Sequence] = []
        while self.waiting and left and len(step.prefills) < self.max_prefills:
            sequence = self.waiting[0]
            if self.manager.num_free_rows < 1 + len(sequence.forks) + self._rows_promised:
                break
            tokens = self._tokens(sequence)
            keys = ExtraKeys(salt=sequence.request.salt)
            match = self.manager.match(tokens, keys)
            if match.leader is not None:
                self.stats.num_waits_for_leader += 1
                passed.append(self.waiting.popleft())
                continue
            count = min(left, len(tokens) - match.num_tokens)
            row = self.manager.admit(
                tokens, keys, match=match, num_new_tokens=count, max_total_tokens=self._most_tokens(sequence)
            )
            if row is None:
                break
            self.waiting.popleft()
            self._enter(sequence, row, match.num_tokens, step)
            self._add_chunk(step, sequence, match.num_tokens, count)
            left -= count
        self.waiting.extendleft(reversed(passed))

    def _add_chunk(self, step: ScheduledStep, sequence: Sequence, start: int, count: int) -> None:
        tokens = self._tokens(sequence)
        is_last = start + count == len(tokens)
        source = len(step.decodes) + len(step.prefills)
        step.prefills.append(PrefillChunk(sequence, start, tokens[start : start + count], is_last))
        self.stats.num_prefill_tokens += count
        if not is_last:
            return
        forks, sequence.forks = sequence.forks, []
        self._rows_promised -= len(forks)
        for member in (sequence, *forks):
            if member is not sequence:
                row = self.manager.fork(sequence.row, len(tokens))
                if row is None:
                    raise RuntimeError("no row for a fork although rows were promised to it")
                self.stats.num_forks += 1
                self._enter(member, row, len(tokens), step)
            member.status = Status.DECODING
            step.samples.append(member)
            step.sample_sources.append(source)
        self._decodes_changed = True

    # Rows

    def _enter(self, sequence: Sequence, row: int, num_tokens: int, step: ScheduledStep) -> None:
        """`sequence` occupies `row`; `num_tokens` of it need not be computed."""
        sequence.row, sequence.status = row, Status.PREFILLING
        self._rows_promised += len(sequence.forks)
        self.running.append(sequence)
        step.new_rows.append((sequence, num_tokens))
        request = sequence.request
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_tokens
            self.stats.num_cached_tokens += num_tokens
            self.stats.num_prompt_tokens += len(request.prompt_token_ids)

    def _leave(self, sequence: Sequence) -> None:
        """`sequence` gives up its row and its blocks."""
        self.manager.free(sequence.row)
        self.running.remove(sequence)
        sequence.row = -1
        self._decodes_changed = True

    def _preempt(self, sequence: Sequence) -> None:
        """Takes the row away; the sequence waits, ahead of all that came later, and is recomputed."""
        self._leave(sequence)
        self._preempted_now = True
        self._rows_promised -= len(sequence.forks)
        sequence.status = Status.WAITING
        sequence.prefill_tokens = sequence.all_token_ids()
        sequence.num_scheduled_outputs = len(sequence.token_ids)
        sequence.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def _forget_waiting(self, sequence: Sequence) -> None:
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            return
        for other in (*self.waiting, *self.running):  # a fork that was never started
            if sequence in other.forks:
                other.forks.remove(sequence)
                if other.status is not Status.WAITING:
                    self._rows_promised -= 1

    @staticmethod
    def _tokens(sequence: Sequence) -> np.ndarray:
        if sequence.prefill_tokens is None:
            raise RuntimeError(f"sequence {sequence.index} of {sequence.request.request_id!r} has nothing to prefill")
        return sequence.prefill_tokens

    @staticmethod
    def _most_tokens(sequence: Sequence) -> int:
        """Tokens whose KV it will ever hold: the last generated one is never written."""
        return len(sequence.request.prompt_token_ids) + sequence.request.max_new_tokens - 1


def rows_of(sequences: Iterable[Sequence]) -> np.ndarray:
    """The rows of sequences, int32."""
    return np.array([sequence.row for sequence in sequences], np.int32)
