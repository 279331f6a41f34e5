"""What the cache has done so far, and how much of the memory in use is not used."""

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
        return self.num_held / self.num_blocks


@dataclass(frozen=True)
class CacheMetrics:
    """Counts since the manager was made.

    Attributes:
        num_requests: requests admitted.
        num_queried_tokens: their tokens.
        num_hit_tokens: those of them that were in the cache.
        num_evictions: blocks whose content was lost to make room.
        num_copies: copies queued and taken, of partial hits and of forks.
        num_wasted_tokens: places in the last blocks of running rows that hold no token.
    """

    num_requests: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_evictions: int
    num_copies: int
    num_wasted_tokens: int

    @property
    def hit_rate(self) -> float:
        """Hit tokens per queried token."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0
