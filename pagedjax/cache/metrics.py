"""What the cache has done so far, and how much of the memory in use is not used."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """What the blocks are used for at this moment, over all pools; the null block is not counted.

    Attributes:
        num_blocks: blocks there are.
        num_held: blocks that somebody owns or holds.
        num_shared: blocks with more than one owner.
        num_cached: blocks, in use or not, whose content can be hit.
    """

    num_blocks: int
    num_held: int
    num_shared: int
    num_cached: int

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, cached ones included."""
        return self.num_blocks - self.num_held

    @property
    def fraction(self) -> float:
        """The share of the blocks that is in use, 0 … 1."""
        return self.num_held / self.num_blocks


@dataclass(frozen=True, slots=True)
class EvictedBlock:
    """How long a block's content lived.

    Attributes:
        residency_s: from taking the block to losing its content, seconds.
        idle_s: since somebody last shared or released it, seconds.
    """

    residency_s: float
    idle_s: float


class BlockSampler:
    """Watches every ``every``-th block, by id, and remembers the last ``most`` evictions among them."""

    def __init__(self, every: int, most: int = 1024, clock: Callable[[], float] = time.monotonic) -> None:
        self.every = every
        self.clock = clock
        self.evicted: deque[EvictedBlock] = deque(maxlen=most)
        self._taken_s: dict[int, float] = {}
        self._used_s: dict[int, float] = {}

    def replace(self, blocks: Iterable[int], content: Iterable[int]) -> None:
        """Blocks get new content; those whose ``content`` is not 0 had some."""
        now = self.clock()
        for block, had_some in zip(blocks, content, strict=True):
            if block % self.every == 0:
                if had_some:
                    self._evict(block, now)
                self._taken_s[block] = self._used_s[block] = now

    def use(self, blocks: Iterable[int]) -> None:
        """Blocks are shared or released."""
        now = self.clock()
        for block in blocks:
            if block in self._used_s:
                self._used_s[block] = now

    def _evict(self, block: int, now: float) -> None:
        if block in self._taken_s:
            self.evicted.append(EvictedBlock(now - self._taken_s.pop(block), now - self._used_s.pop(block)))


@dataclass(frozen=True)
class CacheMetrics:
    """Counts since the manager was made.

    Attributes:
        num_requests: requests admitted.
        num_queried_tokens: their tokens.
        num_hit_tokens: those of them that were in the cache.
        num_evictions: blocks whose content was lost to make room.
        num_copies: copies queued and taken, of partial hits and of forks.
        num_wasted_tokens: places in the last blocks of running rows that hold no token, at this moment.
        evicted: the latest evictions among the sampled blocks.
    """

    num_requests: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_evictions: int
    num_copies: int
    num_wasted_tokens: int
    evicted: tuple[EvictedBlock, ...] = ()

    @property
    def hit_rate(self) -> float:
        """Hit tokens per queried token."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0
