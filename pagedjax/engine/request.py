"""Requests, the sequences that serve them, and what comes out."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from pagedjax.engine.sampling_params import SamplingParams


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = auto()
    PREFILLING = auto()
    DECODING = auto()
    FINISHED = auto()


@dataclass(frozen=True)
class Completion:
    """One generated continuation.

    Attributes:
        index: which of the ``n`` completions.
        token_ids: the generated tokens, a final stop token included.
        text: their text, without stop tokens and stop strings.
        finish_reason: ``"stop"`` or ``"length"``; ``None`` while it is running, ``"abort"``, ``"error"``.
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None


@dataclass(frozen=True)
class RequestOutput:
    """The state of a request, complete or on its way.

    Attributes:
        request_id: the name it was added under.
        prompt: its text; `None` where token ids were given.
        prompt_token_ids: its tokens.
        completions: one for each of ``n``, in order.
        num_cached_tokens: prompt tokens whose KV was in the cache already.
        finished: whether nothing more will come.
        error: what went wrong with this request, if anything.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    completions: list[Completion]
    num_cached_tokens: int
    finished: bool
    error: str | None = None


@dataclass(eq=False)
class Request:
    """A request inside the engine."""

    request_id: str
    prompt: str | None
    prompt_token_ids: np.ndarray  # int32 [tokens]
    params: SamplingParams
    seed: int
    max_new_tokens: int
    stop_ids: frozenset[int]
    salt: str | None = None
    arrival_s: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None
    num_cached_tokens: int | None = None  # of the first admission
    sequences: list[Sequence] = field(default_factory=list)
    error: str | None = None

    @property
    def is_finished(self) -> bool:
        return all(sequence.status is Status.FINISHED for sequence in self.sequences)


@dataclass(eq=False)
class Sequence:
    """One completion of a request while it is made: a row of the engine at times.

    Attributes:
        token_ids: the generated tokens that the host knows.
        num_scheduled_outputs: generated tokens that are known or on their way.
        row: its row while it runs.
        prefill_tokens: what this run has to prefill: the prompt and, after a preemption, what was generated.
        forks: sequences that start from this one's prompt when it is computed.
    """

    request: Request
    index: int
    token_ids: list[int] = field(default_factory=list)
    num_scheduled_outputs: int = 0
    row: int = -1
    status: Status = Status.WAITING
    prefill_tokens: np.ndarray | None = None
    forks: list[Sequence] = field(default_factory=list)
    finish_reason: str | None = None
    num_preemptions: int = 0

    def all_token_ids(self) -> np.ndarray:
        """Prompt and generated tokens, int32."""
        return np.concatenate([self.request.prompt_token_ids, np.asarray(self.token_ids, np.int32)])

    @property
    def num_outputs_left(self) -> int:
        """Tokens that may still be scheduled."""
        return self.request.max_new_tokens - self.num_scheduled_outputs
