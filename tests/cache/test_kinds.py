"""Kinds of cache other than full attention, and several groups at once."""

import numpy as np
import pytest

from pagedjax.cache import (
    ChunkedLocal,
    CrossAttention,
    ExtraKeys,
    FullAttention,
    KVCacheManager,
    Recurrent,
    SlidingWindow,
    StepOrderError,
)
from pagedjax.cache.kinds import NEVER


def step(m: KVCacheManager, rows=(), ids=()) -> list[list[int]]:
    copies = [pair for name in m._pools for pair in m.take_copies(name).tolist()]
    m.settle(m.commit(), np.array(rows, np.int64), np.array(ids, np.int32))
    m.check()
    return copies


def run(m: KVCacheManager, prompt, keys=None) -> int:
    row = m.admit(prompt, keys)
    assert row is not None
    step(m)
    return row


def decode(m: KVCacheManager, row: int, n: int) -> None:
    for token in range(n):
        if m.num_known[row] == m.num_scheduled[row]:
            m.append(row, [token])
        assert m.grow([row], 1)
        step(m)


@pytest.mark.parametrize(
    "kind", [FullAttention(), SlidingWindow(7), ChunkedLocal(6), Recurrent(), CrossAttention(8), SlidingWindow(1)]
)
def test_passed_at_is_when_a_token_is_no_longer_needed(kind):
    for token in range(1, 30):
        at = kind.passed_at(token)
        if at == NEVER:
            assert kind.first_needed(10_000) == 0
        else:
            assert kind.first_needed(at) >= token
            assert kind.first_needed(at - 1) < token


@pytest.mark.parametrize(
    "make", [lambda: SlidingWindow(0), lambda: SlidingWindow(4, sink_tokens=-1), lambda: ChunkedLocal(0)]
)
def test_sizes_must_make_sense(make):
    with pytest.raises(ValueError, match="at least 1"):
        make()


def test_a_window_gives_blocks_back_as_it_moves():
    m = KVCacheManager(30, 2, kinds=(SlidingWindow(4),))
    row = run(m, np.arange(4))
    decode(m, row, 20)
    table = m.block_table(row)
    assert len(table) == 12
    assert np.count_nonzero(table) == 2
    assert m.usage().num_held == 2


def test_a_window_hit_needs_only_the_windows_blocks():
    m = KVCacheManager(40, 2, kinds=(SlidingWindow(4),))
    row = run(m, np.arange(16))
    m.free(row)
    match = m.match(np.arange(20))
    assert match.num_tokens == 16
    row = m.admit(np.arange(20), match=match)
    assert m.block_table(row)[:6].tolist() == [0] * 6
    assert (m.block_table(row)[6:] > 0).all()


def test_a_window_hit_ends_where_a_block_is_missing():
    m = KVCacheManager(40, 2, kinds=(SlidingWindow(4),))
    row = run(m, np.arange(16))
    index = m._groups[0].index
    index.forget(int(m.block_table(row)[6]))
    m.free(row)
    assert m.match(np.arange(20)).num_tokens == 12


def test_sinks_stay():
    m = KVCacheManager(40, 2, kinds=(SlidingWindow(4, sink_tokens=3),))
    row = run(m, np.arange(4))
    first = m.block_table(row)[:2].tolist()
    decode(m, row, 20)
    table = m.block_table(row)
    assert table[:2].tolist() == first
    assert np.count_nonzero(table) == 4


def test_a_hit_needs_the_sinks_too():
    m = KVCacheManager(40, 2, kinds=(SlidingWindow(4, sink_tokens=3),))
    row = run(m, np.arange(16))
    m._groups[0].index.forget(int(m.block_table(row)[1]))
    m.free(row)
    assert m.match(np.arange(20)).num_tokens == 2


def test_chunked_attention_needs_only_its_chunk():
    m = KVCacheManager(40, 2, kinds=(FullAttention(), ChunkedLocal(6)))
    row = run(m, np.arange(4))
    decode(m, row, 12)
    assert np.count_nonzero(m.block_table(row, 1)) == 2
    assert np.count_nonzero(m.block_table(row, 0)) == 8


def test_a_state_is_one_block_and_leaves_checkpoints():
    m = KVCacheManager(20, 4, kinds=(Recurrent(),))
    row = m.admit(np.arange(10), num_new_tokens=8)
    assert m.block_table(row).tolist() == [0, 1]
    step(m)
    assert m.grow([row], 2)
    assert step(m) == [[1, 2]]  # the state goes on in a block of its own
    assert m.match(np.arange(10)).num_tokens == 8
    other = m.admit(np.arange(10))
    assert m.num_scheduled[other] == 10
    assert step(m) == [[1, m.block_table(other)[2]]]


def test_a_state_is_only_hit_at_a_checkpoint():
    m = KVCacheManager(20, 4, kinds=(Recurrent(),))
    run(m, np.arange(10))
    assert m.match(np.arange(10)).num_tokens == 0


def test_a_fork_copies_the_state_that_it_overwrites():
    m = KVCacheManager(20, 4, kinds=(Recurrent(),))
    a = run(m, np.arange(6))
    b = m.fork(a)
    for row in (a, b):
        m.append(row, [row])
    assert m.blocks_to_grow([a, b]) == 1
    assert m.grow([a, b])
    assert step(m) == [[1, m.block_table(a)[1]]]
    assert m.block_table(b)[1] == 1


def test_a_fork_of_an_older_state_starts_at_a_checkpoint_or_anew():
    m = KVCacheManager(20, 4, kinds=(Recurrent(),))
    a = m.admit(np.arange(11), num_new_tokens=8)
    step(m)
    m.grow([a], 3)
    m.take_copies()
    m.commit()  # not settled: the checkpoint is still there
    assert m.num_scheduled[m.fork(a, 9)] == 8
    assert m.num_scheduled[m.fork(a, 7)] == 0
    m.check()


def test_truncating_a_state_goes_back_to_a_checkpoint():
    m = KVCacheManager(20, 4, kinds=(Recurrent(),))
    a = m.admit(np.arange(11), num_new_tokens=8)
    step(m)
    m.grow([a], 3)
    m.take_copies()
    m.commit()
    m.truncate(a, 10)
    assert (m.num_scheduled[a], m.num_known[a]) == (8, 10)
    m.check()


def test_a_state_cannot_go_on_before_it_is_written():
    m = KVCacheManager(20, 4, kinds=(Recurrent(),))
    a = m.admit(np.arange(11), num_new_tokens=3)
    with pytest.raises(StepOrderError, match="state of row 0"):
        m.grow([a], 4)
    b = m.fork(a)
    m.append(b, [1])
    with pytest.raises(StepOrderError, match="state of row"):
        m.grow([b], 1)


def test_a_state_has_a_pool_of_its_own():
    m = KVCacheManager({"kv": 10, "state": 4}, 4, kinds=(FullAttention(), Recurrent()))
    row = run(m, np.arange(20))
    assert np.count_nonzero(m.block_table(row, 1)) == 1
    assert m.usage().num_blocks == 12
    assert m.admit(np.arange(100, 120)) is None  # attention lacks blocks
    m.check()


def test_either_pool_can_be_what_is_lacking():
    m = KVCacheManager({"kv": 100, "state": 2}, 4, kinds=(FullAttention(), Recurrent()))
    row = m.admit(np.arange(3), max_total_tokens=4)
    assert row is not None
    step(m)
    assert m.admit(np.arange(50, 53)) is None
    m.append(row, [1, 2])
    assert m.grow([row], 2) is False
    m.check()


def test_cross_attention_is_taken_once_and_never_hit():
    m = KVCacheManager(40, 4, kinds=(FullAttention(), CrossAttention(10)))
    row = run(m, np.arange(9), ExtraKeys(salt="audio 1"))
    assert len(m.block_table(row, 1)) == 3
    decode(m, row, 8)
    assert len(m.block_table(row, 1)) == 3
    match = m.match(np.arange(9), ExtraKeys(salt="audio 1"))
    assert match.num_tokens == 8
    other = m.admit(np.arange(9), ExtraKeys(salt="audio 1"), match=match)
    assert not set(m.block_table(other, 1)) & set(m.block_table(row, 1))
    child = m.fork(row)
    assert m.block_table(child, 1).tolist() == m.block_table(row, 1).tolist()
    m.check()
    for each in (row, other, child):
        m.free(each)
    assert m.num_free_blocks == 39


def test_something_must_grow():
    with pytest.raises(ValueError, match="add FullAttention"):
        KVCacheManager(40, 4, kinds=(CrossAttention(10),))


def test_groups_of_one_pool_share_its_blocks():
    m = KVCacheManager(40, 4, kinds=(FullAttention(), SlidingWindow(8)))
    row = run(m, np.arange(12))
    both = [*m.block_table(row, 0), *m.block_table(row, 1)]
    assert len(set(both)) == 6
    updates = m.take_table_updates()
    assert updates[:, 0].tolist() == [0, 0, 0, 1, 1, 1]
    assert m.match(np.arange(13)).num_tokens == 12


def test_a_failed_step_takes_back_windows_and_states():
    m = KVCacheManager({"kv": 60, "state": 20}, 2, kinds=(FullAttention(), SlidingWindow(4), Recurrent()))
    row = m.admit(np.arange(20), num_new_tokens=8)
    step(m)
    m.grow([row], 4)
    for name in m._pools:
        m.take_copies(name)
    bad = m.commit()
    m.grow([row], 4)
    for name in m._pools:
        m.take_copies(name)
    m.commit()
    m.fail(bad)
    m.check()
    assert m.num_scheduled[row] == 8
    m.grow([row], 12)
    step(m)
    assert m.match(np.arange(21)).num_tokens == 20


def test_a_row_that_lost_its_state_starts_anew():
    m = KVCacheManager(20, 4, kinds=(Recurrent(),))
    row = m.admit(np.arange(20), num_new_tokens=6)
    step(m)
    m.grow([row], 1)
    bad = m.commit()
    m.fail(bad)
    assert m.num_scheduled[row] == 0
    assert len(m.block_table(row)) == 0
    m.check()
    m.grow([row], 8)
    step(m)
    assert m.match(np.arange(20)).num_tokens == 8
