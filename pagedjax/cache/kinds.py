"""The kinds of cache that layers can have, each reduced to what the bookkeeping must know about it.

A kind answers one question above all: if a sequence has ``n`` tokens, from which of them on does the next token need
the cache (`first_needed`)? Full attention needs all of them, a sliding window the last ``window - 1``, chunked
attention those of the current chunk, and a recurrent state only the last one, since a state stands for everything
before it. Everything else follows: which blocks may be given back, and which ones a hit must find.
"""

from dataclasses import dataclass
from typing import ClassVar

NEVER = 2**31 - 1  # more tokens than any sequence has


def cdiv(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class FullAttention:
    """Every token attends to all before it (also MLA).

    Attributes:
        pool: kinds with the same pool draw their blocks from one set of ids, which requires blocks of equal bytes.
    """

    pool: str = "kv"
    sink_tokens: ClassVar[int] = 0
    in_place: ClassVar[bool] = False
    cacheable: ClassVar[bool] = True

    def first_needed(self, num_tokens: int) -> int:
        """The first token whose cache the token after ``num_tokens`` others needs."""
        return 0

    def passed_at(self, token: int) -> int:
        """The number of tokens from which on ``token - 1`` and all before it are needed no more."""
        return NEVER

    def max_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """The most blocks that a sequence of ``num_tokens`` tokens needs at once, computed ``chunk`` tokens a step."""
        return cdiv(num_tokens, block_size)


@dataclass(frozen=True)
class SlidingWindow:
    """A token attends to itself and the ``window - 1`` before it, and to the first ``sink_tokens`` of the sequence."""

    window: int
    sink_tokens: int = 0
    pool: str = "kv"
    in_place: ClassVar[bool] = False
    cacheable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.window < 1 or self.sink_tokens < 0:
            raise ValueError(f"window is {self.window} and sink_tokens {self.sink_tokens}: at least 1 and 0 are needed")

    def first_needed(self, num_tokens: int) -> int:
        return max(0, num_tokens - self.window + 1)

    def passed_at(self, token: int) -> int:
        return token + self.window - 1

    def max_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        sinks = cdiv(self.sink_tokens, block_size)
        return min(cdiv(num_tokens, block_size), sinks + cdiv(self.window - 1 + chunk, block_size) + 1)


@dataclass(frozen=True)
class ChunkedLocal:
    """A token attends to itself and to those before it in its own chunk of ``chunk`` tokens."""

    chunk: int
    pool: str = "kv"
    sink_tokens: ClassVar[int] = 0
    in_place: ClassVar[bool] = False
    cacheable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"chunk is {self.chunk} but must be at least 1 token")

    def first_needed(self, num_tokens: int) -> int:
        return num_tokens // self.chunk * self.chunk

    def passed_at(self, token: int) -> int:
        return cdiv(token, self.chunk) * self.chunk

    def max_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        return min(cdiv(num_tokens, block_size), cdiv(self.chunk + chunk, block_size) + 1)


@dataclass(frozen=True)
class Recurrent:
    """A state that every token overwrites (Mamba, linear attention): one block is one state.

    The state after token ``n - 1`` lies in the block of that token, entry ``(n - 1) // block_size`` of the table.
    When a step enters a new block, the state is copied there first, so the block left behind keeps the state at its
    end. If a step ended exactly there it is a checkpoint, from which another sequence can start.
    """

    pool: str = "state"
    sink_tokens: ClassVar[int] = 0
    in_place: ClassVar[bool] = True
    cacheable: ClassVar[bool] = True

    def first_needed(self, num_tokens: int) -> int:
        return max(0, num_tokens - 1)

    def passed_at(self, token: int) -> int:
        return token + 1

    def max_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        return min(cdiv(num_tokens, block_size), 2)


@dataclass(frozen=True)
class CrossAttention:
    """KV of an encoder's ``num_tokens`` outputs: taken at admission, constant, never looked up."""

    num_tokens: int
    pool: str = "kv"
    sink_tokens: ClassVar[int] = 0
    in_place: ClassVar[bool] = False
    cacheable: ClassVar[bool] = False

    def first_needed(self, num_tokens: int) -> int:
        return 0

    def passed_at(self, token: int) -> int:
        return NEVER

    def max_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        return cdiv(self.num_tokens, block_size)


Kind = FullAttention | SlidingWindow | ChunkedLocal | Recurrent | CrossAttention
