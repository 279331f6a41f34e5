"""KVCacheManager with full attention: what a scheduler sees."""

import numpy as np
import pytest

from pagedjax.cache import ExtraKeys, KVCacheManager, RequestTooLargeError, StepOrderError


def tokens(n: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + n, dtype=np.int32)


def run(m: KVCacheManager, prompt, keys=None) -> int:
    """Admits a prompt, computes all of it, and returns the row."""
    row = m.admit(prompt, keys)
    assert row is not None
    step(m)
    return row


def step(m: KVCacheManager, rows=(), ids=()) -> tuple[list, int]:
    copies = m.take_copies().tolist()
    m.take_table_updates()
    number = m.commit()
    m.settle(number, np.array(rows, np.int32), np.array(ids, np.int32))
    m.check()
    return copies, number


def test_admission_takes_the_blocks_of_the_prompt():
    m = KVCacheManager(10, 4)
    row = run(m, tokens(10))
    assert m.block_table(row).tolist() == [1, 2, 3]
    assert m.num_scheduled[row] == m.num_known[row] == 10
    assert m.num_free_blocks == 6


def test_a_second_request_hits_all_but_its_last_token():
    m = KVCacheManager(20, 4)
    first = run(m, tokens(16))
    match = m.match(tokens(16))
    assert match.num_tokens == 15
    second = m.admit(tokens(16), match=match)
    assert m.block_table(second)[:3].tolist() == m.block_table(first)[:3].tolist()
    assert m.take_copies().tolist() == [[m.block_table(first)[3], m.block_table(second)[3]]]
    m.check()


@pytest.mark.parametrize("block_size", [1, 3, 4, 16, 64])
@pytest.mark.parametrize("shared", [1, 2, 5, 17, 30, 63])
def test_a_hit_is_as_long_as_the_common_prefix(block_size, shared):
    m = KVCacheManager(200, block_size)
    for finished in (False, True):
        m = KVCacheManager(200, block_size)
        row = run(m, tokens(70))
        if finished:
            m.free(row)
        other = np.concatenate([tokens(shared), tokens(40, 1000)])
        assert m.match(other).num_tokens == shared
        row = run(m, other)
        assert m.match(np.append(other, 7)).num_tokens == len(other)


def test_a_hit_grows_with_every_decoded_token():
    m = KVCacheManager(50, 4)
    row = run(m, tokens(6))
    m.settle(m.commit(), [row], [100])
    said = [*range(6), 100]
    for i in range(20):
        # the last known token is not written until the next step
        assert m.match([*said, 1]).num_tokens == len(said) - 1
        assert m.grow(np.array([row]), 1)
        step(m, [row], [101 + i])
        said.append(101 + i)
    m.free(row)
    assert m.match([*said, 1]).num_tokens == len(said) - 1


def test_what_is_scheduled_but_not_committed_is_not_hit():
    m = KVCacheManager(50, 4)
    m.admit(tokens(16))
    match = m.match(tokens(16))
    assert match.num_tokens == 0
    assert match.leader == 0
    m.commit()
    match = m.match(tokens(16))
    assert (match.num_tokens, match.leader) == (15, None)


def test_a_leader_that_is_freed_wakes_the_waiting_request():
    m = KVCacheManager(50, 4)
    row = m.admit(tokens(16), num_new_tokens=8)
    assert m.match(tokens(12)).leader == row
    m.free(row)
    assert m.match(tokens(12)).leader is None


def test_tokens_whose_ids_are_not_known_are_not_indexed_before_they_are():
    m = KVCacheManager(50, 4)
    row = run(m, tokens(3))
    m.settle(m.commit(), [row], [3])
    assert m.grow([row], 1)
    one = m.commit()  # writes token 3; token 4 is being sampled
    assert m.grow([row], 1)
    two = m.commit()  # writes token 4, whose id nobody knows yet
    assert m.match(tokens(9)).num_tokens == 4
    m.settle(one, [row], [4])
    assert m.match(tokens(9)).num_tokens == 5
    m.settle(two, [row], [5])
    assert m.match(tokens(9)).num_tokens == 5
    m.check()


def test_admission_that_does_not_fit_changes_nothing():
    m = KVCacheManager(5, 4)
    run(m, tokens(9))
    before = m.match(tokens(9)).num_tokens
    assert m.admit(tokens(10, 500)) is None
    assert m.num_free_blocks == 1
    assert m.match(tokens(9)).num_tokens == before
    m.check()


def test_a_request_that_can_never_fit_is_told_so():
    m = KVCacheManager(5, 4)
    with pytest.raises(RequestTooLargeError, match=r"17 tokens, which takes 5 blocks of 4, but pool 'kv' has 4"):
        m.admit(tokens(5), max_total_tokens=17)
    with pytest.raises(RequestTooLargeError, match="9,000 tokens but max_len is 8,192"):
        m.match(tokens(9000))


def test_a_partial_hit_is_given_up_where_holding_its_source_does_not_fit():
    m = KVCacheManager(4, 4)  # three blocks
    m.free(run(m, tokens(3)))
    prompt = [0, 1, 2, *range(100, 109)]
    row = m.admit(prompt)
    assert row is not None
    assert m.num_scheduled[row] == 12
    assert m.take_copies().tolist() == []
    m.check()


def test_growth_is_all_or_nothing_and_predicted():
    m = KVCacheManager(8, 4)
    a, b = run(m, tokens(4)), run(m, tokens(8, 100))
    rows = np.array([a, b])
    assert m.blocks_to_grow(rows, [1, 9]) == 4
    assert m.grow(rows, np.array([9, 9])) is False
    assert m.num_scheduled[rows].tolist() == [4, 8]
    assert m.num_free_blocks == 4
    assert m.grow(rows, np.array([1, 9]))
    assert m.num_free_blocks == 0
    m.check()


def test_fork_copies_only_when_two_owners_write():
    m = KVCacheManager(20, 4)
    a = run(m, tokens(6))
    b = m.fork(a)
    assert m.block_table(a).tolist() == m.block_table(b).tolist()
    copies, number = step(m)
    m.settle(number, [a, b], [50, 60])
    assert m.blocks_to_grow([a, b], 1) == 1
    assert m.grow([a, b], 1)
    copies, _ = step(m)
    assert len(copies) == 1
    assert m.block_table(a)[0] == m.block_table(b)[0]
    assert m.block_table(a)[1] != m.block_table(b)[1]


def test_the_last_owner_copies_nothing():
    m = KVCacheManager(20, 4)
    a = run(m, tokens(6))
    b = m.fork(a)
    m.free(a)
    assert m.blocks_to_grow([b], 1) == 0
    assert m.grow([b], 1)
    assert m.take_copies().tolist() == []


def test_a_fork_of_a_fork_copies_from_the_first_source():
    m = KVCacheManager(20, 4)
    a = run(m, tokens(6))
    b = m.fork(a)
    assert m.grow([b], 1)
    c = m.fork(b)
    assert m.grow([c], 1)
    copies = m.take_copies().tolist()
    source = m.block_table(a)[1]
    assert sorted(copies) == sorted([[source, m.block_table(b)[1]], [source, m.block_table(c)[1]]])
    m.check()


def test_growing_a_child_before_its_parents_chunk_is_dispatched_is_refused():
    m = KVCacheManager(20, 4)
    a = m.admit(tokens(6))
    b = m.fork(a)
    with pytest.raises(StepOrderError, match="grow it after commit"):
        m.grow([b], 1)
    step(m)
    assert m.grow([b], 1)


def test_n_samples_forked_in_the_step_of_the_last_chunk():
    m = KVCacheManager(40, 4)
    a = m.admit(tokens(6))
    children = [m.fork(a) for _ in range(3)]
    number = m.commit()
    rows = np.array([a, *children])
    m.settle(number, rows, [10, 20, 30, 40])
    assert m.num_known[rows].tolist() == [7] * 4
    assert m.blocks_to_grow(rows) == 3
    assert m.grow(rows, 1)
    assert len(step(m, rows, [11, 21, 31, 41])[0]) == 3
    for child, first in zip(rows, (10, 20, 30, 40), strict=True):
        assert m.match([*range(6), first, 0]).num_tokens == 7
        assert m.tokens(child).tolist() == [*range(6), first, first + 1]


def test_freeing_a_destination_cancels_its_copy():
    m = KVCacheManager(20, 4)
    a = run(m, tokens(6))
    b = m.fork(a)
    m.grow([b], 1)
    m.free(b)
    assert m.take_copies().tolist() == []
    m.check()


def test_commit_insists_on_the_copies():
    m = KVCacheManager(20, 4)
    a = run(m, tokens(6))
    m.grow([m.fork(a)], 1)
    with pytest.raises(StepOrderError, match="take_copies"):
        m.commit()


def test_a_failed_step_revokes_its_entries_and_rolls_back():
    m = KVCacheManager(30, 4)
    a = run(m, tokens(8))
    b = m.admit(tokens(16, 100))
    bad = m.commit()
    hit = m.admit(tokens(16, 100))
    assert m.num_scheduled[hit] == 16
    m.take_copies()
    later = m.commit()
    m.fail(bad)
    assert m.num_scheduled[[a, b, hit]].tolist() == [8, 0, 0]
    assert m.match(tokens(16, 100)).num_tokens == 0
    assert m.match(tokens(9)).num_tokens == 8
    m.check()
    with pytest.raises(ValueError, match="not in flight"):
        m.settle(later, [a], [1])
    assert m.grow([b], 16)
    step(m)
    assert m.match(tokens(16, 100)).num_tokens == 15


def test_truncate_gives_back_blocks_and_forgets_hashes():
    m = KVCacheManager(30, 4)
    a = run(m, tokens(14))
    m.truncate(a, 6)
    m.check()
    assert m.num_scheduled[a] == m.num_known[a] == 6
    m.append(a, [90, 91, 92])
    assert m.grow([a], 3)
    step(m)
    assert m.match([*range(6), 90, 91, 92, 5]).num_tokens == 9
    # the second block has been overwritten: its old content cannot be hit
    assert m.match(tokens(14)).num_tokens == 6


def test_rejected_drafts_are_truncated():
    m = KVCacheManager(30, 4)
    a = run(m, tokens(6))
    m.settle(m.commit(), [a], [6])
    m.grow([a], 4)  # one token and three drafts
    number = m.commit()
    m.truncate(a, 8)
    m.settle(number, [a], [[7, 70, 0, 0]], counts=[2])
    m.check()
    assert m.num_known[a] == 9
    assert m.match([0, 1, 2, 3, 4, 5, 6, 7, 70, 1]).num_tokens == 8


def test_settling_late_ignores_rows_that_were_freed_since():
    m = KVCacheManager(30, 4)
    a = m.admit(tokens(5))
    number = m.commit()
    m.free(a)
    b = m.admit(tokens(7, 100))
    assert a == b
    m.settle(number, [a], [33])
    assert m.num_known[b] == 7


def test_keys_keep_tenants_apart():
    m = KVCacheManager(60, 4)
    all_keys = [None, ExtraKeys(salt="x"), ExtraKeys(adapter="x"), ExtraKeys(salt=b"x"), ExtraKeys(adapter=("x", "1"))]
    for keys in all_keys:
        assert m.match(tokens(9), keys).num_tokens == 0
        run(m, tokens(9), keys)
    for keys in all_keys:
        assert m.match(tokens(9), keys).num_tokens == 8


def test_a_hit_ends_before_the_first_token_under_a_differing_span():
    m = KVCacheManager(60, 4)
    run(m, [1, 2, 3, 9, 9, 9, 9, 9, 4, 5], ExtraKeys(spans=((3, 8, b"cat"),)))
    prompt = [1, 2, 3, 9, 9, 9, 9, 9, 4, 5, 6]
    assert m.match(prompt, ExtraKeys(spans=((3, 8, b"cat"),))).num_tokens == 10
    assert m.match(prompt, ExtraKeys(spans=((3, 8, b"dog"),))).num_tokens == 3
    assert m.match(prompt).num_tokens == 3
    assert m.match(prompt, ExtraKeys(spans=((3, 6, b"cat"),))).num_tokens == 6


def test_a_new_epoch_hits_nothing_old():
    m = KVCacheManager(60, 4)
    row = run(m, tokens(9))
    m.advance_epoch()
    assert m.match(tokens(9)).num_tokens == 0
    m.append(row, tokens(5))
    m.grow([row], 5)
    step(m)
    m.free(row)
    assert m.match(tokens(9)).num_tokens == 0
    m.check()


def test_reset_is_refused_while_a_row_is_in_use():
    m = KVCacheManager(60, 4)
    row = run(m, tokens(9))
    assert m.reset() is False
    m.free(row)
    assert m.match(tokens(9)).num_tokens == 8
    assert m.reset() is True
    assert m.match(tokens(9)).num_tokens == 0
    m.check()


def test_eviction_takes_the_least_recently_used_chain_from_its_end():
    m = KVCacheManager(9, 4)
    m.free(run(m, tokens(16)))
    m.free(run(m, tokens(16, 100)))
    run(m, tokens(4, 200))
    assert m.match(tokens(17)).num_tokens == 12
    assert m.match(tokens(17, 100)).num_tokens == 16
    m.check()


def test_table_updates_are_what_changed():
    m = KVCacheManager(20, 4)
    row = m.admit(tokens(5))
    assert m.take_table_updates().tolist() == [[0, row, 0, 1], [0, row, 1, 2]]
    assert m.take_table_updates().tolist() == []
    m.commit()
    m.grow([row], 4)
    assert m.take_table_updates().tolist() == [[0, row, 2, 3]]


def test_duplicates_are_reused_first():
    m = KVCacheManager(20, 4)
    a, b = m.admit(tokens(8)), m.admit(tokens(8))
    step(m)
    theirs = m.block_table(b).tolist()
    m.free(a)
    m.free(b)
    m.check()
    assert m.block_table(run(m, tokens(8, 100))).tolist() in (theirs, theirs[::-1])
    assert m.match(tokens(9)).num_tokens == 8
