"""Block hashes and extra keys."""

import hashlib
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.cache import ExtraKeys, KVCacheManager
from pagedjax.cache.hashing import (
    as_tokens,
    block_bytes,
    common_span_run,
    hash_chain,
    lookup_tokens,
    root_hash,
    span_bytes,
    spans_in,
)


def test_a_hash_covers_parent_and_little_endian_tokens():
    root = root_hash(ExtraKeys(), 0, 2)
    (first, second) = hash_chain(root, block_bytes(as_tokens([1, 2, 3, 4, 5]), 2))
    assert first == hashlib.sha256(root + bytes([1, 0, 0, 0, 2, 0, 0, 0])).digest()
    assert second == hashlib.sha256(first + bytes([3, 0, 0, 0, 4, 0, 0, 0])).digest()


def test_hashes_are_the_same_in_every_process():
    program = (
        "from pagedjax.cache import ExtraKeys; from pagedjax.cache.hashing import *; "
        "keys = ExtraKeys(salt='s', adapter=('a', 'r'), spans=((1, 3, b'd'),)); "
        "print(hash_block(root_hash(keys, 3, 4), bytes(16), span_bytes(spans_in(keys.spans, 0, 4))).hex())"
    )
    runs = {
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(runs) == 1
    assert len(runs.pop().strip()) == 64


def test_importing_the_cache_does_not_import_jax():
    program = (
        "import sys, pagedjax.cache; assert not any(name.split('.')[0] in ('jax', 'flax') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


text = st.text(max_size=4) | st.binary(max_size=4)
keys = st.builds(
    ExtraKeys,
    salt=st.none() | text,
    adapter=st.none() | st.text(max_size=4) | st.tuples(st.text(max_size=4), st.text(max_size=4)),
)


@given(keys, keys, st.integers(0, 3), st.integers(0, 3))
def test_roots_are_equal_only_for_equal_keys(a, b, epoch_a, epoch_b):
    same = (a, epoch_a, type(a.salt)) == (b, epoch_b, type(b.salt))
    assert (root_hash(a, epoch_a, 16) == root_hash(b, epoch_b, 16)) is same


def test_the_block_size_is_part_of_the_root():
    assert root_hash(ExtraKeys(), 0, 16) != root_hash(ExtraKeys(), 0, 32)


@pytest.mark.parametrize("spans", [((3, 3, b"x"),), ((3, 5, b"x"), (4, 6, b"y")), ((-1, 2, b"x"),), ((0, 1, "x"),)])
def test_spans_must_be_sorted_and_disjoint(spans):
    with pytest.raises(ValueError, match="spans are sorted and disjoint"):
        ExtraKeys(spans=spans)


def test_spans_are_seen_from_the_block():
    spans = ((2, 9, b"a"), (9, 12, b"b"))
    assert spans_in(spans, 4, 8) == ((-2, 4, b"a"),)
    assert spans_in(spans, 8, 12) == ((-6, 1, b"a"), (1, 4, b"b"))
    assert spans_in(spans, 12, 16) == ()
    assert span_bytes(spans_in(spans, 4, 8)) != span_bytes(((-2, 3, b"a"),))


def test_a_run_ends_where_digest_or_offset_differ():
    assert common_span_run(((0, 4, b"a"),), ((0, 4, b"a"),), 6) == 6
    assert common_span_run(((0, 4, b"a"),), ((0, 2, b"a"), (2, 4, b"a")), 6) == 2
    assert common_span_run((), ((3, 4, b"a"),), 6) == 3


def test_codes_differ_by_digest_position_and_token():
    tokens = as_tokens([7] * 6)
    a = lookup_tokens(tokens, ((1, 5, b"a"),))
    b = lookup_tokens(tokens, ((1, 5, b"b"),))
    assert a[0] == b[0] == a[5] == 7
    assert (a[1:5] < 0).all()
    assert len({*a[1:5].tolist(), *b[1:5].tolist()}) == 8
    assert lookup_tokens(as_tokens([8] * 6), ((1, 5, b"a"),))[1] != a[1]
    assert (lookup_tokens(tokens, ((1, 9, b"a"),))[1:5] == a[1:5]).all()  # a span may go past the end


def test_tokens_have_one_axis():
    with pytest.raises(ValueError, match=r"shape \(1, 2\)"):
        as_tokens(np.zeros((1, 2)))


def truth(tokens: list[int], spans: tuple, at: int) -> tuple:
    return tokens[at], next(((digest, at - a) for a, b, digest in spans if a <= at < b), None)


spans_strategy = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 5), st.sampled_from([b"x", b"y"])), max_size=2
).map(
    lambda parts: tuple(
        (a, b, d)
        for a, b, d, before in [
            (start, start + length, digest, index) for index, (start, length, digest) in enumerate(sorted(parts))
        ]
    )
)


def disjoint(spans: tuple) -> bool:
    return all(a[1] <= b[0] for a, b in pairwise(spans))


request = st.tuples(st.lists(st.integers(0, 1), min_size=2, max_size=14), spans_strategy.filter(disjoint))


@given(st.lists(request, min_size=2, max_size=8), st.sampled_from([1, 2, 3, 4]), st.booleans())
def test_a_hit_under_spans_is_the_longest_common_prefix_of_tokens_and_keys(requests, block_size, finish):
    """With an unbounded pool and whole requests as they come, the hit is exactly the longest common prefix."""
    manager = KVCacheManager(400, block_size, max_rows=16, max_len=32)
    seen: list[list[tuple]] = []
    for tokens, spans in requests:
        keys = ExtraKeys(spans=tuple((a, min(b, len(tokens)), d) for a, b, d in spans if a < len(tokens)))
        real = [truth(tokens, keys.spans, at) for at in range(len(tokens))]
        most = 0
        for other in seen:
            n = next(
                (at for at, (x, y) in enumerate(zip(real, other, strict=False)) if x != y), min(len(real), len(other))
            )
            most = max(most, min(n, len(tokens) - 1))
        match = manager.match(tokens, keys)
        assert match.num_tokens <= most, "a hit that is none"
        assert match.num_tokens == most
        row = manager.admit(tokens, keys, match=match)
        assert row is not None
        manager.take_copies()
        manager.settle(manager.commit(), [], [])
        manager.check()
        if finish:
            manager.free(row)
            manager.check()
        seen.append(real)
