"""Events, metrics and the picture of the pool."""

import numpy as np
import pytest

from pagedjax.cache import (
    BlockRemoved,
    BlockStored,
    CacheCleared,
    ExtraKeys,
    FullAttention,
    KVCacheManager,
    Recurrent,
)
from pagedjax.cache.hashing import root_hash
from pagedjax.cache.metrics import BlockSampler, EvictedBlock


def run(m: KVCacheManager, prompt, keys=None) -> int:
    row = m.admit(prompt, keys)
    assert row is not None
    m.take_copies()
    m.settle(m.commit(), [], [])
    m.check()
    return row


def test_a_router_can_follow_the_events():
    m = KVCacheManager(6, 4, events=True)
    row = run(m, np.arange(9))
    first, second = m.take_events()
    assert isinstance(first, BlockStored)
    assert first.parent_hash == root_hash(ExtraKeys(), 0, 4)
    assert first.tokens == (0, 1, 2, 3)
    assert (second.parent_hash, second.tokens) == (first.block_hash, (4, 5, 6, 7))
    m.free(row)
    run(m, np.arange(100, 116))
    events = m.take_events()
    assert [event.block_hash for event in events if isinstance(event, BlockRemoved)] == [second.block_hash]
    m.advance_epoch()
    assert m.take_events() == [CacheCleared()]
    assert m.take_events() == []


def test_events_carry_true_tokens_and_spans():
    m = KVCacheManager(20, 4, events=True)
    run(m, [7] * 9, ExtraKeys(spans=((2, 6, b"cat"),)))
    first, second = m.take_events()
    assert first.tokens == second.tokens == (7, 7, 7, 7)
    assert (first.spans, second.spans) == (((2, 4, b"cat"),), ((-2, 2, b"cat"),))


def test_events_are_off_by_default():
    m = KVCacheManager(20, 4)
    run(m, np.arange(9))
    assert m.take_events() == []


def test_equal_content_is_reported_once():
    m = KVCacheManager(20, 4, events=True)
    a, b = m.admit(np.arange(8)), m.admit(np.arange(8))
    m.commit()
    assert len(m.take_events()) == 2
    m.free(a)
    m.free(b)
    assert m.take_events() == []


def test_a_duplicate_takes_over_when_the_first_is_lost():
    m = KVCacheManager(20, 4, events=True)
    a, b = m.admit(np.arange(8)), m.admit(np.arange(8))
    m.settle(m.commit(), [], [])
    m.take_events()
    theirs = m.block_table(b).tolist()
    m.free(a)
    run(m, np.arange(100, 168))  # takes everything that is free
    assert m.match(np.arange(9)).num_tokens == 8
    assert m.match(np.arange(9)).hits[0].blocks.tolist() == theirs
    m.free(b)
    m.check()


def test_metrics_count_tokens_copies_and_waste():
    m = KVCacheManager(40, 4)
    run(m, np.arange(10))
    run(m, [*range(7), 50])
    metrics = m.metrics()
    assert (metrics.num_requests, metrics.num_queried_tokens, metrics.num_hit_tokens) == (2, 18, 7)
    assert metrics.hit_rate == 7 / 18
    assert metrics.num_copies == 1
    assert metrics.num_wasted_tokens == 2
    assert KVCacheManager(4, 4).metrics().hit_rate == 0


def test_usage_says_what_is_shared_and_cached():
    m = KVCacheManager(40, 4)
    a = run(m, np.arange(10))
    run(m, np.arange(8))
    usage = m.usage()
    assert (usage.num_blocks, usage.num_held, usage.num_shared) == (39, 4, 1)
    assert usage.num_free == 35
    assert usage.fraction == 4 / 39
    m.free(a)
    assert m.usage().num_cached == 3


def test_the_sampler_measures_residency_and_idle_time():
    now = [0.0]
    sampler = BlockSampler(2, clock=lambda: now[0])
    sampler.replace([1, 2], [0, 0])
    now[0] = 3.0
    sampler.use([1, 2])
    now[0] = 10.0
    sampler.replace([1, 2], [1, 1])
    assert list(sampler.evicted) == [EvictedBlock(10.0, 7.0)]


def test_sampled_evictions_reach_the_metrics():
    m = KVCacheManager(6, 4, sample_every=1)
    m.free(run(m, np.arange(9)))
    m.free(run(m, np.arange(9)))
    run(m, np.arange(100, 120))
    evicted = m.metrics().evicted
    assert len(evicted) == m.metrics().num_evictions == 3
    assert all(each.residency_s >= each.idle_s >= 0 for each in evicted)


def busy() -> KVCacheManager:
    m = KVCacheManager({"kv": 40, "state": 6}, 4, kinds=(FullAttention(), Recurrent()))
    a = m.admit(np.arange(14), num_new_tokens=8)
    m.settle(m.commit(), [], [])
    m.grow([a], 6)
    m.take_copies("state")
    m.settle(m.commit(), [], [])
    m.fork(a)
    m.free(m.admit(np.arange(100, 106)))
    m.admit([*range(8), 1, 2])  # queues the copy of a state
    return m


def test_the_text_shows_every_pool_and_row():
    text = busy().snapshot().text(width=20)
    assert "pool kv: 39 blocks of 4 tokens" in text
    assert "pool state: 5 blocks" in text
    assert "copies: " in text
    assert "row 0 (A): 14 tokens known, 14 scheduled" in text
    assert "0####" in text


def test_the_text_of_a_big_pool_is_cut():
    assert "… and 904 more" in KVCacheManager(1000, 4).snapshot().text(most_blocks=96)


def test_every_state_has_its_letter():
    m = KVCacheManager(12, 4)
    a = run(m, np.arange(6))
    m.free(a)
    b = run(m, np.arange(50, 58))
    m.fork(b)
    m.admit([0, 1, 2, 3, 4, 9])
    (pool,) = m.snapshot().pools
    assert set(pool.states) == {"null", "free", "held", "shared", "owned"}
    assert {"#", ".", "0", "h"} < set(pool.letters())
    m.take_copies()
    assert "cached" in m.snapshot().pools[0].states


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture_is_written(tmp_path, suffix):
    pytest.importorskip("matplotlib", reason="the optional dependency `plot` is not installed")
    path = tmp_path / f"pool.{suffix}"
    busy().snapshot().plot(path)
    assert path.stat().st_size > 2000
    assert path.read_bytes()[1:4] == b"PNG" if suffix == "png" else b"<svg" in path.read_bytes()
