"""KVCacheManager: refusals, limits, options and stale matches."""

import pytest
from test_manager import run, step, tokens

from pagedjax.cache import ExtraKeys, KVCacheManager


def test_a_growth_by_one_that_does_not_fit_changes_nothing():
    m = KVCacheManager(4, 4)
    a, b = run(m, tokens(4)), run(m, tokens(8, 100))
    assert m.num_free_blocks == 0
    assert m.grow([a, b], 1) is False
    assert m.num_scheduled[[a, b]].tolist() == [4, 8]
    m.check()


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_free_row_cannot_grow(block_size):
    m = KVCacheManager(20, block_size)
    for counts in (1, 2):
        with pytest.raises(ValueError, match="row 7 is free"):
            m.grow([7], counts)


def test_a_row_cannot_outgrow_max_len():
    m = KVCacheManager(20, 4, max_len=10)
    a = run(m, tokens(9))
    m.settle(m.commit(), [a], [1])
    assert m.grow([a], 1)
    step(m, [a], [2])  # the token after the last place may be known, but is never computed
    with pytest.raises(ValueError, match="row 0 would have 11 tokens but max_len is 10"):
        m.grow([a], 1)
    step(m, [a], [3])
    with pytest.raises(ValueError, match="row 0 would know 13 tokens"):
        m.settle(m.commit(), [a], [4])
    with pytest.raises(ValueError, match="row 0 would know 14 tokens"):
        m.settle(m.commit(), [a], [[4, 5]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.match([]), "tokens is empty"),
        (lambda m: m.match([1, -2]), "tokens holds -2"),
        (lambda m: m.admit([1, 2], num_new_tokens=3), "num_new_tokens is 3 but the prompt has 2"),
        (lambda m: m.admit([1, 2], num_new_tokens=0), "num_new_tokens is 0"),
        (lambda m: m.admit([1, 2], max_total_tokens=65), "may grow to 65 tokens but max_len is 64"),
        (lambda m: m.fork(0, 7), "num_tokens is 7 but row 0 has 6"),
        (lambda m: m.fork(5), "row 5 is not in use"),
        (lambda m: m.fork(99), "row 99 is not in use"),
        (lambda m: m.free(5), "row 5 is not in use"),
        (lambda m: m.truncate(0, 0), "num_tokens is 0 but row 0 has 6"),
        (lambda m: m.truncate(0, 7), "num_tokens is 7 but row 0 has 6"),
        (lambda m: m.append(0, tokens(59)), "would have 65 tokens but max_len is 64"),
        (lambda m: (m.append(0, [1]), m.grow([0], 2), m.append(0, [2])), "scheduled 8 tokens but knows 7"),
        (lambda m: m.fail(77), "step 77 cannot fail"),
        (lambda m: m.settle(77, [], []), "step 77 is not in flight"),
        (lambda m: (m.free(0), m.free(0)), "row 0 is not in use"),
    ],
)
def test_what_makes_no_sense_is_refused(call, message):
    m = KVCacheManager(20, 4, max_len=64)
    run(m, tokens(6))
    with pytest.raises(ValueError, match=message):
        call(m)
    m.check()


@pytest.mark.parametrize("name", ["block_size", "max_rows", "max_len"])
def test_sizes_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        KVCacheManager(**{"num_blocks": 20, "block_size": 4, name: 0})


def test_a_settled_step_cannot_fail():
    m = KVCacheManager(20, 4)
    m.admit(tokens(6))
    number = m.commit()
    m.settle(number, [], [])
    with pytest.raises(ValueError, match="has been settled"):
        m.fail(number)


def test_there_may_be_no_row_left():
    m = KVCacheManager(20, 4, max_rows=1)
    a = run(m, tokens(6))
    assert m.num_free_rows == 0
    assert m.fork(a) is None
    assert m.admit(tokens(3)) is None
    assert m.num_blocks == 20


def test_a_row_with_spans_decodes_and_forks():
    m = KVCacheManager(60, 4)
    keys = ExtraKeys(spans=((2, 5, b"cat"),))
    a = run(m, [1, 2, 9, 9, 9, 3], keys)
    m.settle(m.commit(), [a], [50])
    child = m.fork(a, 4)
    for token in range(51, 58):
        m.grow([a], 1)
        step(m, [a], [token])
    assert m.tokens(a).tolist() == [1, 2, 9, 9, 9, 3, *range(50, 58)]
    assert m.match([1, 2, 9, 9, 9, 3, *range(50, 58), 0], keys).num_tokens == 13
    assert m.match([1, 2, 9, 9, 9, 3, *range(50, 58), 0]).num_tokens == 2
    m.append(child, [70, 71, 72, 73, 74])  # the child's picture ends where it was cut
    m.grow([child], 5)
    step(m)
    assert m.tokens(child).tolist() == [1, 2, 9, 9, 70, 71, 72, 73, 74]
    cut = ExtraKeys(spans=((2, 4, b"cat"),))
    assert m.match([1, 2, 9, 9, 70, 71, 72, 73, 74, 0], cut).num_tokens == 9
    m.truncate(a, 4)
    m.settle(m.commit(), [a], [[80, 81, 82]], counts=[2])
    assert m.tokens(a).tolist() == [1, 2, 9, 9, 80, 81]
    m.check()


def test_a_fork_made_while_a_step_is_in_flight_fails_with_it():
    m = KVCacheManager(60, 4)
    a = m.admit(tokens(12), num_new_tokens=5)
    m.commit()
    m.grow([a], 4)
    bad = m.commit()
    b = m.fork(a)
    c = m.fork(b, 7)
    m.free(b)
    b = m.admit(tokens(3, 100))  # takes the freed row
    m.fail(bad)
    m.check()
    assert m.num_scheduled[[a, b, c]].tolist() == [4, 0, 4]  # the second block was indexed, so all of it is revoked


def test_without_prefix_caching_nothing_is_hit():
    m = KVCacheManager(60, 4, enable_prefix_caching=False)
    a = run(m, tokens(12))
    assert m.match(tokens(12)).num_tokens == 0
    b = m.fork(a)
    m.append(b, [1])
    assert m.grow([b], 1)
    step(m)
    m.free(a)
    m.free(b)
    assert m.usage().num_cached == 0


def test_partial_hits_shorter_than_the_minimum_are_not_worth_a_copy():
    m = KVCacheManager(60, 8, min_partial_hit=3)
    run(m, tokens(12))
    assert m.match([*range(10), 50]).num_tokens == 8
    assert m.match([*range(11), 50]).num_tokens == 11


def test_a_leader_must_give_enough():
    m = KVCacheManager(60, 8, min_leader_gain=4)
    m.admit(tokens(20))
    assert m.match([0, 1, 2, 50, 51]).leader is None
    assert m.match([0, 1, 2, 3, 50, 51]).leader == 0
    assert m.match([0, 1, 2, 3, 50, 51], ExtraKeys(salt="x")).leader is None
    assert m.match([7]).leader is None


def test_many_salts_do_not_pile_up():
    m = KVCacheManager(60, 8)
    for salt in range(5000):
        m.match([1, 2], ExtraKeys(salt=str(salt)))
    assert len(m._admission._roots) < 4200


def test_a_match_of_another_epoch_is_made_anew():
    m = KVCacheManager(60, 4)
    m.free(run(m, tokens(9)))
    match = m.match(tokens(9))
    m.advance_epoch()
    row = m.admit(tokens(9), match=match)
    assert m.num_scheduled[row] == 9
    step(m)
    assert m.match(tokens(9)).num_tokens == 8


def test_a_match_whose_source_has_been_freed_is_shortened():
    m = KVCacheManager(4, 4, max_rows=4)
    a = run(m, tokens(3))
    match = m.match([0, 1, 2, 50])
    m.free(a)
    m.free(m.admit(tokens(12, 100)))  # the source is evicted
    row = m.admit([0, 1, 2, 50], match=match, num_new_tokens=1)
    assert (match.num_tokens, m.num_scheduled[row]) == (0, 1)
    m.check()
