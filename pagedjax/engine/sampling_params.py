"""What a request asks for: how to choose tokens and when to stop. Validated when made, before anything changes."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_SEED = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen.

    Attributes:
        max_tokens: tokens to generate at most; `None` generates until the model's limit.
        n: completions of one prompt; they share the prompt's blocks.
        temperature: divides the logits; 0 is greedy.
        top_k: only the k most likely tokens; 0 takes all.
        top_p: only the most likely tokens whose probabilities reach this sum (Holtzman et al., 2019).
        min_p: only tokens at least this likely relative to the most likely one.
        seed: 0 to 2**32 - 1. The same tokens, parameters and seed give the same completions; `None` draws one.
        stop: strings that end a completion; they are not part of its text.
        stop_token_ids: token ids that end a completion.
        ignore_eos: do not stop at the model's end-of-sequence tokens.

    >>> SamplingParams(temperature=0.8, top_p=0.95, seed=0).is_greedy
    False
    >>> SamplingParams(top_p=0.0)
    Traceback (most recent call last):
        ...
    ValueError: top_p is 0.0 but must be above 0 and at most 1; 1 keeps all tokens
    """

    max_tokens: int | None = 128
    n: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, None, "ask for at least one completion")
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, None, "ask for at least one token")
        _check_int("top_k", self.top_k, 0, None, "0 keeps all tokens")
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED, "or leave it out to have one drawn")
        if not (_is_number(self.temperature) and math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature!r} but must be a finite number from 0; 0 is greedy")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p is {self.top_p!r} but must be above 0 and at most 1; 1 keeps all tokens")
        if not (_is_number(self.min_p) and 0 <= self.min_p <= 1):
            raise ValueError(f"min_p is {self.min_p!r} but must lie between 0 and 1; 0 keeps all tokens")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if any(not isinstance(text, str) or not text for text in stop):
            raise ValueError(f"stop is {self.stop!r} but every stop string needs at least one character")
        ids = tuple(self.stop_token_ids)
        for token in ids:
            _check_int("a stop token id", token, 0, None, "token ids count from 0")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", ids)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_int(name: str, value: object, least: int, most: int | None, hint: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r} but must be a whole number; {hint}")
    if value < least or (most is not None and value > most):
        limit = f"at least {least}" if most is None else f"between {least} and {most}"
        raise ValueError(f"{name} is {value} but must be {limit}; {hint}")
