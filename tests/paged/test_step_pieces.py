"""The batch of a step, and NNX modules that attend through pages, against plain causal attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax.nnx import PagedAttention, attach, cache_layers, detach
from pagedjax.paged import CacheLayer, PagesSpec, default_placement, make_batch, update_block_tables

HIDDEN, HEADS, KV_HEADS, DIM, LAYERS = 32, 4, 2, 8, 3


class Tiny(nnx.Module):
    """Attention layers with residuals, and nothing else."""

    def __init__(self, rngs):
        self.qkv = nnx.List([nnx.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * DIM, rngs=rngs) for _ in range(LAYERS)])
        self.out = nnx.List([nnx.Linear(HEADS * DIM, HIDDEN, rngs=rngs) for _ in range(LAYERS)])
        self.attend = nnx.List(
            [PagedAttention(layer=i, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM) for i in range(LAYERS)]
        )

    def __call__(self, x):
        for qkv, attend, out in zip(self.qkv, self.attend, self.out, strict=True):
            heads = qkv(x).reshape(*x.shape[:2], -1, DIM)
            q, k, v = jnp.split(heads, [HEADS, HEADS + KV_HEADS], axis=2)
            x = x + out(attend(q, k, v).reshape(*x.shape[:2], -1))
        return x


def test_make_batch_places_tokens_where_the_tables_say():
    tables = jnp.array([[[5, 6, 0], [7, 8, 9], [0, 0, 0]]], jnp.int32)
    batch, positions = make_batch(
        tables,
        jnp.array([3, 6, 0], jnp.int32),
        jnp.array([0, 99, 1], jnp.int32),  # one decode, one padding decode, one chunk
        jnp.array([1, 0, 3], jnp.int32),
        num_decodes=2,
        num_tokens=7,
        num_blocks=10,
        block_size=4,
    )
    assert positions.tolist() == [3, 0, 6, 7, 8, 0, 0]
    slots = batch.slots[0].tolist()
    assert [slots[i] for i in (0, 2, 3, 4)] == [5 * 4 + 3, 8 * 4 + 2, 8 * 4 + 3, 9 * 4]
    padding = [slots[i] for i in (1, 5, 6)]
    assert min(padding) >= 40
    assert len(set(padding)) == 3
    assert batch.kv_lens.tolist() == [4, 0, 9]
    assert batch.query_start.tolist() == [0, 1, 2, 5]


def test_a_token_without_a_block_is_written_nowhere():
    batch, _ = make_batch(
        jnp.zeros((1, 1, 2), jnp.int32),
        jnp.array([1], jnp.int32),
        jnp.array([0], jnp.int32),
        jnp.array([1], jnp.int32),
        num_decodes=1,
        num_tokens=1,
        num_blocks=4,
        block_size=2,
    )
    assert batch.slots[0, 0] >= 8


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_chunked_prefill_and_decode_through_pages_equal_causal_attention(block_size):
    model = Tiny(nnx.Rngs(0))
    lengths, chunk = [11, 5], 4
    inputs = [jax.random.normal(jax.random.key(i), (n, HIDDEN)) for i, n in enumerate(lengths)]
    wanted = [np.asarray(model(x[None])[0]) for x in inputs]

    max_blocks = -(-max(lengths) // block_size)
    spec = PagesSpec.for_layers(cache_layers(model), num_blocks=2 * max_blocks + 1, block_size=block_size)
    placement = default_placement()
    pages = tuple(jnp.full_like(array, jnp.nan) for array in spec.allocate())
    ids = np.random.default_rng(0).permutation(np.arange(1, 2 * max_blocks + 1)).reshape(2, max_blocks)
    tables = jnp.asarray(ids[None], jnp.int32)
    graphdef, params = nnx.split(model)

    @jax.jit
    def step(params, pages, tokens, row_ids, query_lens, context_lens):
        module = nnx.merge(graphdef, params)
        batch, _ = make_batch(
            tables,
            context_lens,
            row_ids,
            query_lens,
            num_decodes=1,
            num_tokens=1 + chunk,
            num_blocks=spec.num_blocks,
            block_size=block_size,
        )
        attach(module, pages, batch, spec=spec, placement=placement)
        hidden = module(tokens[None])[0]
        return hidden, detach(module, spec)

    lens = np.zeros(2, np.int32)
    found = [[], []]
    while lens[0] < lengths[0] or lens[1] < lengths[1]:  # row 1 decodes, row 0 prefills
        tokens = np.zeros((1 + chunk, HIDDEN), np.float32)
        decodes, size = int(lens[1] < lengths[1]), min(chunk, lengths[0] - lens[0])
        tokens[:decodes] = inputs[1][lens[1] : lens[1] + decodes]
        tokens[1 : 1 + size] = inputs[0][lens[0] : lens[0] + size]
        hidden, pages = step(params, pages, tokens, jnp.array([1, 0]), jnp.array([decodes, size]), jnp.asarray(lens))
        found[1].append(hidden[:decodes])
        found[0].append(hidden[1 : 1 + size])
        lens += np.array([size, decodes], np.int32)
    for row in range(2):
        np.testing.assert_allclose(np.concatenate(found[row]), wanted[row], atol=2e-5)


def test_updates_of_block_tables_drop_padding():
    tables = jnp.zeros((2, 2, 3), jnp.int32)
    far = np.iinfo(np.int32).max
    updates = jnp.array([[1, 0, 2, 7], [0, 1, 0, 5], [far, far, far, far]], jnp.int32)
    changed = np.asarray(update_block_tables(tables, updates))
    assert changed[1, 0, 2] == 7
    assert changed[0, 1, 0] == 5
    assert np.count_nonzero(changed) == 2


def test_groups_have_equal_layer_counts_and_share_arrays():
    full, local = CacheLayer(1, 8, 8), CacheLayer(1, 8, 8, window=16)
    spec = PagesSpec.for_layers([local] * 5 + [full], num_blocks=4, block_size=4)
    assert spec.num_arrays == 1
    assert sorted(spec.layer_groups) == [0, 1, 2, 3, 4, 5]
    spec = PagesSpec.for_layers([local, full, local, full], num_blocks=4, block_size=4)
    assert spec.layer_groups == (0, 1, 0, 1)
    assert spec.layer_arrays == (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("block_size", "k_dim", "dtype", "factor"),
    [(64, 64, "bfloat16", 1.0), (64, 80, "bfloat16", 1.6), (64, 96, "bfloat16", 4 / 3), (1, 64, "bfloat16", 2.0)],
)
def test_physical_bytes_count_the_padding_of_tpu_tiles(block_size, k_dim, dtype, factor):
    spec = PagesSpec.for_layers([CacheLayer(8, k_dim, k_dim)], num_blocks=2, block_size=block_size, dtype=dtype)
    assert spec.physical_block_bytes("tpu") == pytest.approx(factor * spec.block_bytes)
    assert spec.physical_block_bytes("gpu") == spec.block_bytes


def test_more_shards_than_heads_keep_copies_and_other_counts_are_refused():
    spec = PagesSpec.for_layers([CacheLayer(2, 8, 8)], num_blocks=2, block_size=4, num_shards=8)
    assert spec.physical_heads == 8
    with pytest.raises(ValueError, match="3 KV heads and 2 shards"):
        PagesSpec.for_layers([CacheLayer(3, 8, 8)], num_blocks=2, block_size=4, num_shards=2)


def test_layers_must_be_numbered_in_order():
    model = nnx.List([PagedAttention(layer=i, num_heads=2, num_kv_heads=2, head_dim=4) for i in (0, 2)])
    with pytest.raises(ValueError, match=r"numbered \[0, 2\]"):
        cache_layers(model)
