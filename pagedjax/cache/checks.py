"""Every invariant that can be seen from the host, checked across pools, tables, index and rows."""

from collections.abc import Mapping, Sequence

from pagedjax.cache.block_pool import BlockPool
from pagedjax.cache.copies import CopyQueue
from pagedjax.cache.group import Group
from pagedjax.cache.kinds import NEVER, cdiv
from pagedjax.cache.rows import FREE, Rows


def check_manager(
    rows: Rows, groups: Sequence[Group], pools: Mapping[str, BlockPool], copies: Mapping[str, CopyQueue]
) -> None:
    """Raises AssertionError with what is wrong."""
    _check_rows(rows)
    used = rows.used
    for name, pool in pools.items():
        owners = [0] * pool.num_blocks
        users: dict[int, int] = {}
        for group in groups:
            if group.pool is pool:
                for row in used:
                    for block in group.table[row, : group.num_blocks[row]].tolist():
                        if block:
                            owners[block] += 1
                            assert users.setdefault(block, group.number) == group.number, "two groups use one block"
        pool.check(owners)
        copies[name].check()
        assert pool.num_free + pool.num_used + 1 == pool.num_blocks
    for group in groups:
        group.index.check()
        _check_tables(group, rows)


def _check_rows(rows: Rows) -> None:
    used = rows.used
    assert sorted(rows.free + used) == list(range(rows.max_rows)), "a row is both free and used, or neither"
    for row in used:
        written, scheduled, known = (int(a[row]) for a in (rows.num_written, rows.num_scheduled, rows.num_known))
        assert 0 <= written <= scheduled <= rows.max_len, f"row {row}: {written} written, {scheduled} scheduled"
        assert rows.num_settled[row] <= scheduled
        assert len(rows.hashes[row]) <= known // rows.block_size, (
            f"row {row} has hashes of tokens that it does not know"
        )
        if rows.index_at[row] != NEVER:
            indexed = int(rows.num_indexed[row])
            assert indexed * rows.block_size <= min(written, known), (
                f"row {row}: more is indexed than written and known"
            )
            assert min(written, known) < rows.index_at[row], f"row {row}: a whole block is not indexed"
            assert len(rows.hashes[row]) >= indexed
    for row in rows.free:
        assert rows.serial[row] == FREE, f"row {row} is free but has a serial"
        assert rows.limit[row] == -1, f"row {row} is free but has a limit"
        assert rows.num_scheduled[row] == rows.num_written[row] == rows.num_known[row] == 0, (
            f"free row {row} has tokens"
        )


def _check_tables(group: Group, rows: Rows) -> None:
    for row in rows.free:
        assert group.num_blocks[row] == 0, f"free row {row} has blocks"
    if not group.kind.cacheable:
        return
    for row in rows.used:
        n = int(group.num_blocks[row])
        scheduled = int(rows.num_scheduled[row])
        assert n == cdiv(scheduled, rows.block_size), f"row {row} has {n} blocks for {scheduled} tokens"
        assert group.num_synced[row] <= n
        blocks = [block for block in group.table[row, :n].tolist() if block]
        assert len(set(blocks)) == len(blocks), f"row {row} has a block twice"
        first = min(int(group.kept_from[row]), n) if not group.kind.in_place else max(n - 1, 0)
        needed = [*range(first, n), *range(min(group.num_sinks, n))]
        assert all(group.table[row, place] for place in needed), f"row {row} lacks a block that it needs"
        if rows.limit[row] != scheduled and n and not group.kind.in_place:
            tail = int(group.table[row, n - 1])
            if scheduled % rows.block_size and rows.limit[row] > scheduled:
                assert group.pool.owners[tail] == 1, f"row {row} may write into block {tail}, which others own"
