"""What happened to the cached content: for a router that wants to know which server has which prefix.

Only whole blocks are reported, once each, however many copies there are; hashes are those of `hashing`, so two
processes name equal content alike. Events are off by default, and then nothing is built for them.
"""

from dataclasses import dataclass

from pagedjax.cache.hashing import Span


@dataclass(frozen=True, slots=True)
class BlockStored:
    """The KV of ``tokens`` after the prefix ``parent_hash`` can be reused from now on.

    Attributes:
        block_hash: 32 bytes.
        parent_hash: 32 bytes: the block before, or the root of the chain.
        tokens: the block's tokens.
        group: the group of layers.
        spans: the spans that touch the block, relative to its first token.
    """

    block_hash: bytes
    parent_hash: bytes
    tokens: tuple[int, ...]
    group: int = 0
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """No block holds this content any more."""

    block_hash: bytes
    group: int = 0


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Nothing that was stored before can be reused."""


Event = BlockStored | BlockRemoved | CacheCleared
