"""The part of the manager that only looks: counts, tables, metrics, a picture, and the check of all invariants."""

import numpy as np
from numpy.typing import NDArray

from pagedjax.cache.admission import Admission
from pagedjax.cache.block_pool import BlockPool
from pagedjax.cache.checks import check_manager
from pagedjax.cache.copies import CopyQueue
from pagedjax.cache.group import Group
from pagedjax.cache.metrics import CacheMetrics, Usage
from pagedjax.cache.rows import Rows
from pagedjax.cache.snapshot import Snapshot, take_snapshot


class Observable:
    """What can be asked of a `KVCacheManager` without changing it."""

    block_size: int
    num_known: NDArray[np.int32]
    _rows: Rows
    _groups: list[Group]
    _growing: list[Group]
    _pools: dict[str, BlockPool]
    _copies: dict[str, CopyQueue]
    _admission: Admission

    @property
    def num_blocks(self) -> int:
        """Blocks of the first pool, the null block included."""
        return next(iter(self._pools.values())).num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the first pool that can be taken, cached ones included."""
        return next(iter(self._pools.values())).num_free

    @property
    def num_free_rows(self) -> int:
        return len(self._rows.free)

    def block_table(self, row: int, group: int = 0) -> NDArray[np.int32]:
        """A copy of the row's block table, int32 ``[num_blocks of the row]``."""
        self._require_used(row)
        return self._groups[group].table[row, : self._groups[group].num_blocks[row]].copy()

    def tokens(self, row: int) -> NDArray[np.int32]:
        """A copy of the row's known tokens, int32 ``[num_known]``."""
        self._require_used(row)
        return self._rows.true_tokens.get(row, self._rows.tokens[row])[: self.num_known[row]].copy()

    def usage(self) -> Usage:
        """What the blocks are used for right now."""
        pools = self._pools.values()
        return Usage(
            num_blocks=sum(pool.num_blocks - 1 for pool in pools),
            num_held=sum(pool.num_used for pool in pools),
            num_shared=sum(pool.num_shared for pool in pools),
            num_cached=sum(group.index.num_findable for group in self._groups),
        )

    def metrics(self) -> CacheMetrics:
        """Counts since the manager was made."""
        admission, rows = self._admission, self._rows
        used = np.array(rows.used, np.intp)
        places = int((self._growing[0].num_blocks[used] * self.block_size - rows.num_scheduled[used]).sum())
        return CacheMetrics(
            admission.num_requests,
            admission.num_queried,
            admission.num_hit,
            sum(pool.num_evictions for pool in self._pools.values()),
            sum(copies.num_copies for copies in self._copies.values()),
            places,
            tuple(each for pool in self._pools.values() if pool.sampler is not None for each in pool.sampler.evicted),
        )

    def snapshot(self) -> Snapshot:
        """A picture of the pools at this moment: ``print(manager.snapshot().text())``, or ``.plot("pool.svg")``."""
        return take_snapshot(self._rows, self._groups, self._pools)

    def check(self) -> None:
        """Raises AssertionError unless every invariant holds. Takes time in proportion to the pool."""
        check_manager(self._rows, self._groups, self._pools, self._copies)

    def _require_used(self, row: int) -> None:
        if not self._rows.is_used(row):
            raise ValueError(f"row {row} is not in use")
