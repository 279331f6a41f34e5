"""Admission: looking a prompt up, seeing whether it fits, and giving it a row.

Everything is worked out before anything changes: what `Admission.fits` counts is what `Admission.take_in` takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagedjax.cache.block_pool import BlockPool
from pagedjax.cache.coordinator import find_hit
from pagedjax.cache.group import NO_BLOCKS, Group, GroupHit, Query
from pagedjax.cache.hashing import (
    ExtraKeys,
    Tokens,
    block_bytes,
    hash_block,
    hash_chain,
    lookup_tokens,
    root_hash,
    span_bytes,
)
from pagedjax.cache.kinds import cdiv
from pagedjax.cache.rows import Rows


class RequestTooLargeError(ValueError):
    """A request can never fit, however long it waits."""


@dataclass(slots=True)
class Match:
    """What a prompt finds in the cache. Nothing is reserved by it.

    Attributes:
        num_tokens: the hit: leading tokens whose KV need not be computed; at most ``num_prompt_tokens - 1``.
        leader: the row that is computing more of this prompt right now, so that waiting a step beats computing; or
            None.
    """

    num_tokens: int
    leader: int | None
    query: Query
    hits: list[GroupHit]
    versions: list[int]

    @property
    def epoch(self) -> int:
        return self.versions[0]


class Admission:
    """Lets requests into ``rows``.

    Attributes:
        epoch: counts changes of the weights; part of every root.
        num_requests, num_queried, num_hit: admitted requests, their tokens, and those that were cached.
    """

    def __init__(
        self,
        rows: Rows,
        groups: Sequence[Group],
        pools: dict[str, BlockPool],
        *,
        caching: bool,
        min_partial_hit: int,
        min_leader_gain: int,
    ) -> None:
        self.rows, self.groups, self.pools = rows, groups, pools
        self.block_size, self.max_len = rows.block_size, rows.max_len
        self.caching = caching
        self.min_partial_hit, self.min_leader_gain = min_partial_hit, min_leader_gain
        self.in_place = any(group.kind.in_place for group in groups)
        self.epoch = 0
        self.num_requests = self.num_queried = self.num_hit = 0
        self._roots: dict[tuple[object, ...], bytes] = {}

    def look_up(self, tokens: Tokens, keys: ExtraKeys) -> Match:
        query = self._query(tokens, keys)
        if not self.caching:
            return Match(0, None, query, [GroupHit(NO_BLOCKS) for _ in self.groups], self._versions())
        length, hits = find_hit(self.groups, query, tokens.size - 1, self.min_partial_hit)
        step = self.block_size if self.in_place else 1
        leader = self.rows.leader(query.root, query.tokens[:-1], length, self.min_leader_gain, step)
        return Match(length, leader, query, hits, self._versions())

    def _versions(self) -> list[int]:
        return [self.epoch, self.rows.version, *(group.index.version for group in self.groups)]

    def _query(self, tokens: Tokens, keys: ExtraKeys) -> Query:
        if tokens.size == 0:
            raise ValueError("tokens is empty; a request needs at least one token")
        if tokens.size > self.max_len:
            raise RequestTooLargeError(
                f"the prompt has {tokens.size:,} tokens but max_len is {self.max_len:,}; shorten it or raise max_len"
            )
        if tokens.min() < 0:
            raise ValueError(f"tokens holds {tokens.min()} but token ids are not negative")
        root = self._root(keys)
        if not self.caching:
            return Query(tokens, tokens, keys.spans, root, [])
        if not keys.spans:
            return Query(tokens, tokens, (), root, hash_chain(root, block_bytes(tokens, self.block_size)))
        query = Query(lookup_tokens(tokens, keys.spans), tokens, keys.spans, root, [])
        for at, block in enumerate(block_bytes(tokens, self.block_size)):
            detail = query.detail(at * self.block_size, (at + 1) * self.block_size)
            query.hashes.append(hash_block(query.parent(at), block, span_bytes(detail[1]) if detail else b""))
        return query

    def _root(self, keys: ExtraKeys) -> bytes:
        name = (type(keys.salt), keys.salt, keys.adapter)
        if name not in self._roots:
            if len(self._roots) > 4096:
                self._roots.clear()
            self._roots[name] = root_hash(keys, self.epoch, self.block_size)
        return self._roots[name]

    def new_epoch(self) -> None:
        self.epoch += 1
        self._roots.clear()

    def revalidate(self, match: Match) -> None:
        """Entries may have gone since the look-up: shortens the match to what is still there."""
        if match.versions == self._versions():
            return
        match.query.forget_answers()
        match.num_tokens, match.hits = find_hit(self.groups, match.query, match.num_tokens, self.min_partial_hit)
        match.versions = self._versions()

    def admit(self, match: Match, num_new_tokens: int | None, max_total: int) -> int | None:
        """`KVCacheManager.admit`."""
        self.revalidate(match)
        num_tokens = match.query.tokens.size
        new = num_tokens - match.num_tokens if num_new_tokens is None else num_new_tokens
        if not 1 <= new <= num_tokens - match.num_tokens:
            raise ValueError(
                f"num_new_tokens is {new} but the prompt has {num_tokens - match.num_tokens} tokens after its hit of "
                f"{match.num_tokens}; at least one is computed"
            )
        self.require_possible(max(num_tokens, max_total), new)
        if not self.rows.free:
            return None
        length, hits = match.num_tokens, match.hits
        if not self.fits(length, hits, new):
            rest = length % self.block_size
            if not rest:
                return None
            # Holding the source of a partial copy may be what does not fit.
            length, hits = find_hit(self.groups, match.query, length - rest, self.min_partial_hit)
            new = num_tokens - length if num_new_tokens is None else num_new_tokens
            if not self.fits(length, hits, new):
                return None
            match.num_tokens, match.hits = length, hits
        return self.take_in(match.query, length, hits, new)

    def require_possible(self, total: int, new: int) -> None:
        if total > self.max_len:
            raise RequestTooLargeError(
                f"the request may grow to {total:,} tokens but max_len is {self.max_len:,}; lower it, or raise max_len"
            )
        for name, pool in self.pools.items():
            needed = sum(
                group.kind.max_blocks(total, new, self.block_size) for group in self.groups if group.pool is pool
            )
            if needed > pool.num_blocks - 1:
                raise RequestTooLargeError(
                    f"the request may grow to {total:,} tokens, which takes {needed:,} blocks of {self.block_size}, "
                    f"but pool {name!r} has {pool.num_blocks - 1:,}; lower its limit or give the cache more memory"
                )

    def fits(self, length: int, hits: list[GroupHit], new: int) -> bool:
        for pool in self.pools.values():
            needed = 0
            for group, hit in zip(self.groups, hits, strict=True):
                if group.pool is pool:
                    needed += group.num_new_blocks(len(hit.blocks), length, length + new)
            if needed + self._num_idle(pool, hits) > pool.num_free:
                return False
        return True

    def _num_idle(self, pool: BlockPool, hits: list[GroupHit]) -> int:
        """How many blocks of a hit are free, and will not be once it is taken."""
        idle = 0
        for group, hit in zip(self.groups, hits, strict=True):
            if group.pool is pool:
                idle += pool.num_idle(hit.held)
                if hit.source:
                    idle += pool.num_idle(np.array([hit.source]))
        return idle

    def take_in(self, query: Query, length: int, hits: list[GroupHit], new: int) -> int:
        rows = self.rows
        row = rows.take()
        # All shares and holds come before any allocation, which could evict another group's hit.
        for group, hit in zip(self.groups, hits, strict=True):
            group.pool.share(hit.held)
            if hit.source:
                group.pool.hold(hit.source)
        for group, hit in zip(self.groups, hits, strict=True):
            count = group.num_new_blocks(len(hit.blocks), length, length + new)
            group.attach(row, hit, length, length + new, group.pool.take(count))
            if hit.source:
                group.pool.unhold(hit.source)  # the queued copy holds it now
        n = query.tokens.size
        rows.tokens[row, :n] = query.tokens
        if query.spans:
            rows.spans[row] = query.spans
            rows.true_tokens[row] = np.zeros(rows.width, np.int32)
            rows.true_tokens[row][:n] = query.true_tokens
        whole = length // self.block_size
        rows.num_known[row] = n
        rows.num_scheduled[row] = length + new
        rows.num_written[row] = whole * self.block_size  # the rest once its copy has been dispatched
        rows.limit[row] = min(cdiv(length + new, self.block_size) * self.block_size, self.max_len)
        if self.caching:
            rows.start_indexing(row, query.root, query.hashes.copy(), whole)
        self.num_requests += 1
        self.num_queried += n
        self.num_hit += length
        return row
