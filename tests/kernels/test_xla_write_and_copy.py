"""Writes and copies: right, in place, and nothing else touched."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from pagedjax.kernels import reference
from pagedjax.kernels.xla import copy_blocks, paged_attention, quantize, write_kv, write_quantized_kv


def bits(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_tokens=st.sampled_from([1, 3, 8]),
    block_size=st.sampled_from([1, 16, 32]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    lanes=st.sampled_from([(4, 4, None, 8), (4, 3, 6, 12), (6, 4, 0, 6)]),
    layer=st.sampled_from([0, 1, 2]),
)
def test_writes_match_the_oracle_and_touch_nothing_else(
    seed: int, num_tokens: int, block_size: int, dtype: str, lanes: tuple[int, int, int | None, int], layer: int
) -> None:
    rng = np.random.default_rng(seed)
    k_dim, v_dim, v_offset, width = lanes
    pages = np.full((3 * 8, 2, block_size, width), np.nan).astype(jnp.dtype(dtype))
    k = rng.normal(size=(num_tokens, 2, k_dim)).astype(jnp.dtype(dtype))
    v = k[..., :v_dim] if v_offset == 0 else rng.normal(size=(num_tokens, 2, v_dim)).astype(jnp.dtype(dtype))
    slots = rng.choice(8 * block_size, num_tokens, replace=False).astype(np.int32)
    for beyond in (-1, 3 * 8 * block_size, 2**31 - 1):
        slots[rng.random(num_tokens) < 0.2] = beyond
    arguments = (pages, k, v, slots)
    got = jax.jit(functools.partial(write_kv, v_offset=v_offset))(*arguments, block_offset=8 * layer)
    want = reference.write_kv(*arguments, v_offset=v_offset, block_offset=8 * layer)
    np.testing.assert_array_equal(bits(got), bits(want))


def test_quantised_writes_come_back_within_half_a_step() -> None:
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, 5, 2, 8)).astype(np.float32)
    slots = np.array([16, 17, -1, 3, 200], np.int32)
    pages, scales = np.full((6, 2, 16, 16), 7, np.int8), np.full((6, 2, 32), np.nan, np.float32)
    new_pages, new_scales = jax.jit(write_quantized_kv)(pages, scales, k, v, slots)
    k_values, k_scales = quantize(k, jnp.int8)
    v_values, v_scales = quantize(v, jnp.int8)
    np.testing.assert_array_equal(new_pages, reference.write_kv(pages, k_values, v_values, slots))
    want = scales.copy()
    for token in (0, 1, 3):
        block, offset = divmod(int(slots[token]), 16)
        want[block, :, offset], want[block, :, 16 + offset] = k_scales[token], v_scales[token]
    np.testing.assert_array_equal(new_scales, want)
    error = np.abs(np.asarray(k_values) * np.asarray(k_scales)[..., None] - k)
    assert (error <= 0.51 * np.asarray(k_scales)[..., None]).all()


def test_quantised_zeros_are_zeros() -> None:
    values, scales = quantize(jnp.zeros((3, 4)), jnp.float8_e4m3fn)
    np.testing.assert_array_equal(values.astype(jnp.float32) * scales[:, None], 0)


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("num_copies", [0, 1, 3])
def test_copies_match_the_oracle_in_all_arrays(num_layers: int, num_copies: int) -> None:
    rng = np.random.default_rng(0)
    pages = [rng.normal(size=(num_layers * 8, 2, 4, 6)).astype(np.float32), rng.normal(size=(num_layers * 8, 2, 8))]
    copies = np.array([[1, 5], [1, 6], [2, 7], [0, 0]], np.int32)
    got = jax.jit(functools.partial(copy_blocks, num_layers=num_layers))(pages, copies, num_copies)
    for array, want in zip(got, pages, strict=True):
        want = reference.copy_blocks(want.astype(array.dtype), copies, num_copies, num_layers=num_layers)
        np.testing.assert_array_equal(array, want)


def _analysis(function: Any, num_blocks: int, num_arrays: int = 1, dtype: Any = jnp.float32) -> tuple[int, int, int]:
    """Bytes of the pages, bytes aliased and temporary bytes of a jitted function of a list of pages."""
    pages = [jax.ShapeDtypeStruct((num_blocks, 3, 32, 128), dtype)] * num_arrays
    memory = jax.jit(function, donate_argnums=0).lower(pages).compile().memory_analysis()
    size = num_arrays * num_blocks * 3 * 32 * 128 * jnp.dtype(dtype).itemsize
    return size, memory.alias_size_in_bytes, memory.temp_size_in_bytes


def _write(pages: list[jax.Array], slots: jax.Array) -> list[jax.Array]:
    k = jnp.ones((slots.size, 3, 64), jnp.float32)
    return [write_kv(p, k, 2 * k, slots) for p in pages]


def _attend(pages: jax.Array, kv_lens: jax.Array) -> jax.Array:
    tables = jnp.arange(1, 65, dtype=jnp.int32).reshape(4, 16)
    start = jnp.arange(5, dtype=jnp.int32)
    return paged_attention(jnp.ones((4, 9, 64)), pages, tables, jnp.arange(4), kv_lens, start, num_decodes=4, v_dim=64)


def write(pages: list[jax.Array]) -> Any:
    return _write(pages, jnp.array([33, 70, 5000000, 100]))


def copy(pages: list[jax.Array]) -> Any:
    return copy_blocks(pages, jnp.array([[1, 2], [3, 4]]), jnp.argmax(jnp.array([0, 1, 0])))


def scan_of_steps(pages: list[jax.Array]) -> Any:
    """Three steps of copies, writes and attention: what a k-step decode is made of."""

    def step(carry: Any, i: jax.Array) -> Any:
        pages, x = carry
        pages = copy_blocks(pages, jnp.stack([i + 1, i + 9])[None], i % 2)
        slots = jnp.array([33, 70, 5000000, 100]) + i + x.astype(jnp.int32)
        pages = _write(pages, slots)
        x = sum(_attend(p, jnp.array([40, 7, 0, 300]) + i).sum() for p in pages)
        return (pages, x), x

    return lax.scan(step, (pages, jnp.float32(0)), jnp.arange(3))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("function", [write, copy, scan_of_steps])
def test_pages_are_updated_in_place_whatever_the_size_of_the_pool(function: Any, dtype: Any) -> None:
    size, aliased, temporary = _analysis(function, 100, 2, dtype)
    assert aliased >= size
    larger, aliased_larger, temporary_larger = _analysis(function, 1000, 2, dtype)
    assert aliased_larger >= larger
    assert temporary_larger == temporary


def test_shapes_that_do_not_fit_raise() -> None:
    pages = jnp.zeros((4, 2, 16, 16))
    with pytest.raises(ValueError, match="k of shape"):
        write_kv(pages, jnp.zeros((3, 1, 8)), None, jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match="v of shape"):
        write_kv(pages, jnp.zeros((3, 2, 8)), jnp.zeros((3, 2, 9)), jnp.zeros(3, jnp.int32))
