"""The xla backend's attention against the float64 oracle."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import Case, make_case

from pagedjax.kernels import reference
from pagedjax.kernels.xla import paged_attention

STATIC = ("num_decodes", "v_dim", "v_offset", "scale", "window", "sink_tokens", "soft_cap")
attend = jax.jit(paged_attention, static_argnames=STATIC)
BLOCK_SIZES = [1, 16, 32, 128]


def check(case: Case, tolerance: float) -> None:
    got = attend(*case.arguments(), **case.options)
    assert got.dtype == case.q.dtype
    want = reference.paged_attention(*case.arguments(), **case.options)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance)


def lengths(block_size: int) -> list[int]:
    return sorted({1, max(block_size - 1, 1), block_size, block_size + 1, 3 * block_size + 2, 200})


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("batch", [1, 2, 8])
def test_decodes_of_all_lengths_match_the_oracle(block_size: int, batch: int) -> None:
    some = lengths(block_size)
    for first in range(0, len(some), batch):
        case = make_case(first, (some[first:] + some)[:batch], block_size=block_size)
        check(case, 2e-6)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_prefill_chunks_of_all_lengths_match_the_oracle(block_size: int) -> None:
    chunks = [(n, n) for n in lengths(block_size) if n < 150] + [(1, 40), (7, 200), (block_size, 2 * block_size + 1)]
    check(make_case(1, [], chunks, block_size=block_size), 2e-6)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ragged_mixes_with_padding_match_the_oracle(block_size: int, dtype: str) -> None:
    case = make_case(
        2,
        [block_size, 0, 5, 170, 0],
        [(3, 9), (0, 0), (70, 75), (1, 1), (0, 0)],
        block_size=block_size,
        padding_tokens=6,
        dtype=jnp.dtype(dtype),
    )
    check(case, 2e-6 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_sequences_of_the_demo_shape_match_the_oracle(dtype: str) -> None:
    rng = np.random.default_rng(0)
    lens = [1, 32, 33, 300, 0, *rng.integers(1, 320, 11).tolist()]
    case = make_case(3, lens, [(150, 190)], block_size=32, heads=(9, 3), k_dim=64, v_dim=64, dtype=jnp.dtype(dtype))
    check(case, 4e-6 if dtype == "float32" else 2e-2)


OPTIONS: dict[str, dict[str, Any]] = {
    "one KV head": {"heads": (4, 1)},
    "as many KV heads as heads": {"heads": (3, 3)},
    "scale": {"scale": 0.3},
    "soft cap": {"soft_cap": 2.0},
    "window": {"window": 20},
    "window of one": {"window": 1},
    "window and sinks": {"window": 20, "sink_tokens": 4},
    "window and a block of sinks": {"window": 33, "sink_tokens": 16},
    "sinks beyond the window": {"window": 8, "sink_tokens": 50},
    "latent attention": {"heads": (4, 1), "k_dim": 12, "v_dim": 8, "v_offset": 0},
    "wide values": {"k_dim": 8, "v_dim": 12, "width": 24},
    "padded lanes": {"k_dim": 8, "v_dim": 6, "v_offset": 16, "width": 32},
    "stacked layers": {"layers": 3, "layer": 1},
    "int8 pages": {"pages_dtype": jnp.int8},
    "int8 pages, stacked, window": {"pages_dtype": jnp.int8, "layers": 2, "layer": 1, "window": 20, "sink_tokens": 2},
    "fp8 pages": {"pages_dtype": jnp.float8_e4m3fn},
    "bfloat16 pages under float32": {"pages_dtype": jnp.bfloat16},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_matches_the_oracle(name: str) -> None:
    decodes = [1, 16, 17, 90, 0, 200]
    check(make_case(4, decodes, [(5, 90), (40, 40), (0, 0), (20, 150)], padding_tokens=3, **OPTIONS[name]), 1e-5)


def test_sink_logits_only_enlarge_the_sum() -> None:
    case = make_case(5, [1, 40, 0], [(20, 33)], padding_tokens=2)
    case.options["sink_logits"] = np.random.default_rng(0).normal(size=6).astype(np.float32)
    check(case, 2e-6)


@pytest.mark.parametrize("options", [{}, {"window": 20, "sink_tokens": 3, "soft_cap": 3.0}])
def test_float64_is_exact(options: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        case = make_case(6, [1, 17, 200, 0], [(20, 33), (100, 100)], dtype=np.float64, padding_tokens=1, **options)
        check(case, 1e-13)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**31),
    decodes=st.lists(st.integers(0, 70), max_size=4),
    chunks=st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 40)).map(lambda c: (c[0], c[0] and sum(c))), max_size=3
    ),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 9]),
    sink_tokens=st.sampled_from([0, 3]),
)
def test_any_ragged_batch_matches_the_oracle(
    seed: int, decodes: list[int], chunks: list[tuple[int, int]], block_size: int, window: int | None, sink_tokens: int
) -> None:
    if not decodes and not chunks:
        return
    case = make_case(
        seed, decodes, chunks, block_size=block_size, window=window, sink_tokens=sink_tokens, padding_tokens=2
    )
    check(case, 5e-6)


def test_no_sequence_at_all_gives_zeros() -> None:
    case = make_case(7, [0, 0], [(0, 0)], padding_tokens=4)
    np.testing.assert_array_equal(attend(*case.arguments(), **case.options), 0)


def test_lengths_are_data_one_program_serves_all() -> None:
    compiled = jax.jit(functools.partial(paged_attention, num_decodes=4, v_dim=8))
    rng = np.random.default_rng(0)
    tables = np.arange(1, 1 + 6 * 64, dtype=np.int32).reshape(6, 64)
    pages = rng.normal(size=(400, 2, 16, 16)).astype(np.float32)
    q = rng.normal(size=(24, 6, 8)).astype(np.float32)
    for lens in ([1, 2, 3, 4, 20, 0], [900, 5, 0, 64, 1000, 500], [0] * 6):
        start = np.array([0, 1, 2, 3, 4, 24 if lens[5] == 0 else 10, 24], np.int32)
        got = compiled(q, pages, tables, np.arange(6), np.array(lens, np.int32), start)
        want = reference.paged_attention(q, pages, tables, np.arange(6), lens, start, num_decodes=4, v_dim=8)
        np.testing.assert_allclose(got, want, atol=5e-6)
    assert compiled._cache_size() == 1


@pytest.mark.parametrize(("num_decodes", "num_tokens"), [(1, 1), (8, 8), (2, 66)])
def test_temporaries_do_not_grow_with_the_pool(num_decodes: int, num_tokens: int) -> None:
    def temporaries(num_blocks: int) -> int:
        batch = num_decodes + (num_tokens > num_decodes)
        lowered = jax.jit(functools.partial(paged_attention, num_decodes=num_decodes, v_dim=64)).lower(
            jax.ShapeDtypeStruct((num_tokens, 9, 64), jnp.float32),
            jax.ShapeDtypeStruct((num_blocks, 3, 32, 128), jnp.float32),
            jax.ShapeDtypeStruct((16, 64), jnp.int32),
            jax.ShapeDtypeStruct((batch,), jnp.int32),
            jax.ShapeDtypeStruct((batch,), jnp.int32),
            jax.ShapeDtypeStruct((batch + 1,), jnp.int32),
        )
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporaries(100) == temporaries(1000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": np.zeros((2, 5, 8), np.float32)}, "5 query heads cannot share 2 KV heads"),
        ({"q": np.zeros((2, 6, 32), np.float32)}, "do not fit pages of width 16"),
        ({"kv_lens": np.zeros(3, np.int32)}, "2 row_ids need as many kv_lens"),
    ],
)
def test_shapes_that_do_not_fit_raise(change: dict[str, Any], message: str) -> None:
    case = make_case(8, [3, 4])
    for name, value in change.items():
        setattr(case, name, value)
    with pytest.raises(ValueError, match=message):
        paged_attention(*case.arguments(), **case.options)
