"""Parts of the engine on their own: sampling, buckets, text, packing, configuration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.engine import EngineConfig, SamplingParams
from pagedjax.engine.buckets import Buckets
from pagedjax.engine.config import parse_bytes
from pagedjax.engine.sampler import RowSampling, kept, sample
from pagedjax.engine.text import TextStream

KEPT = jax.jit(kept)
SAMPLE = jax.jit(sample)


def sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, index=0, rows=1):
    def full(value, dtype):
        return jnp.full(rows, value, dtype)

    return RowSampling(
        full(temperature, jnp.float32),
        full(top_k, jnp.int32),
        full(top_p, jnp.float32),
        full(min_p, jnp.float32),
        full(seed, jnp.int32),
        full(index, jnp.int32),
    )


def kept_by_sorting(scaled, top_k, top_p, min_p):
    """The same by sorting, in float64."""
    scaled = scaled.astype(np.float64)
    order = np.argsort(-scaled, kind="stable")
    keep = np.zeros(len(scaled), bool)
    most = order[: top_k or None]
    probabilities = np.exp(scaled[most] - scaled.max())
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities) - probabilities
    keep[most[(before < top_p) | (top_p >= 1)]] = True
    return keep & (np.exp(scaled - scaled.max()) >= min_p)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(0, 50), st.floats(0.05, 1.0), st.sampled_from([0.0, 0.1, 0.5]))
def test_top_k_top_p_and_min_p_keep_what_sorting_keeps(seed, top_k, top_p, min_p):
    scaled = (3 * np.random.default_rng(seed).standard_normal(50)).astype(np.float32)
    found = np.asarray(KEPT(jnp.asarray(scaled)[None], sampling(top_k=top_k, top_p=top_p, min_p=min_p)))[0]
    wanted = kept_by_sorting(scaled, top_k, np.float32(top_p), np.float32(min_p))
    # within rounding of the sums the last token of the nucleus may go either way
    assert np.count_nonzero(found != wanted) <= (0 if top_p == 1 else 1)
    assert found[scaled.argmax()]


def test_draws_follow_the_distribution():
    logits = jnp.log(jnp.array([0.5, 0.3, 0.2, 1e-9]))
    rows = 20_000
    params = sampling(rows=rows)
    drawn = SAMPLE(jnp.tile(logits, (rows, 1)), params, jnp.arange(rows, dtype=jnp.int32))
    shares = np.bincount(np.asarray(drawn), minlength=4) / rows
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.2, 0.0], atol=0.015)


def test_a_draw_depends_on_seed_index_and_position_only():
    logits = jax.random.normal(jax.random.key(0), (1, 1000))
    draw = jax.jit(lambda params, position: sample(jnp.tile(logits, (params.seed.shape[0], 1)), params, position)[0])
    base = int(draw(sampling(), jnp.array([3])))
    assert int(draw(sampling(rows=5), jnp.array([3, 1, 2, 9, 9]))) == base
    others = [
        int(draw(sampling(seed=1), jnp.array([3]))),
        int(draw(sampling(index=1), jnp.array([3]))),
        int(draw(sampling(), jnp.array([4]))),
    ]
    assert len({base, *others}) > 2


def test_greedy_rows_stay_greedy_beside_others():
    logits = jax.random.normal(jax.random.key(1), (4, 64))
    params = sampling(rows=4)
    mixed = RowSampling(jnp.array([0.0, 2.0, 0.0, 2.0]), *list(vars(params).values())[1:])
    drawn = SAMPLE(logits, mixed, jnp.zeros(4, jnp.int32))
    np.testing.assert_array_equal(np.asarray(drawn)[[0, 2]], np.asarray(logits.argmax(-1))[[0, 2]])


@given(st.integers(1, 70), st.integers(1, 700), st.data())
def test_every_step_fits_a_bucket_that_is_listed(max_rows, max_prefill_tokens, data):
    buckets = Buckets(max_rows=max_rows, max_prefill_tokens=max_prefill_tokens)
    decodes = data.draw(st.integers(0, max_rows))
    prefills = data.draw(st.integers(0, min(max_rows - decodes, buckets.max_prefills)))
    if not decodes + prefills:
        return
    tokens = data.draw(st.integers(prefills, max_prefill_tokens)) if prefills else 0
    samples = data.draw(st.integers(decodes, max_rows)) if prefills else decodes
    bucket = buckets.pick(decodes=decodes, prefill_tokens=tokens, prefills=prefills, samples=samples)
    assert bucket in buckets.all()
    assert bucket.num_decodes >= decodes
    assert bucket.num_prefill_tokens >= tokens
    assert bucket.num_prefills >= prefills
    assert bucket.num_samples >= bucket.num_decodes + samples - decodes


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3), st.data())
def test_text_ends_at_the_first_stop_string_and_never_shows_a_part_of_one(text, stops, data):
    stream = TextStream(tuple(stops))
    position = 0
    ends = [place for stop in stops if (place := text.find(stop)) >= 0]
    while position < len(text) and not stream.stopped:
        size = data.draw(st.integers(1, 3))
        stream.feed(text[position : position + size])
        position += size
        shown = stream.visible
        assert text.startswith(shown)
        assert all(stop not in shown for stop in stops)
        if ends and position < len(text):
            assert len(shown) <= max(len(text) - 1, 0)
    assert stream.stopped == bool(ends)
    if not ends:
        assert stream.finish() == text
    else:
        assert all(stop not in stream.finish() for stop in stops)
        assert text.startswith(stream.finish())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("n", 0),
        ("n", True),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("seed", -1),
        ("seed", 2**32),
        ("stop", ("",)),
        ("stop_token_ids", (-1,)),
    ],
)
def test_sampling_params_name_what_is_wrong(field, value):
    with pytest.raises(ValueError, match=field.split("_token")[0]):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 1},
        {"block_size": 0},
        {"max_rows": 0},
        {"kv_memory": "lots"},
        {"kv_memory": "0"},
        {"num_blocks": 9, "kv_memory": "1GiB"},
        {"kv_dtype": "int32"},
        {"max_prefill_tokens": 0},
    ],
)
def test_engine_config_names_what_is_wrong(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        EngineConfig(**settings)


def test_sizes_with_units_are_bytes():
    assert parse_bytes("1.5 GiB") == 3 << 29
    assert parse_bytes("64k") == 65536
