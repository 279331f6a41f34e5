"""The decoder's numbers, from files of every kind, against float64 NumPy and against Hugging Face transformers."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from tiny_models import LLAMA3, Tiny, inverse_frequencies, oracle_logits, write_gguf, write_hf

from pagedjax.models import Llama, ModelConfig, load_model
from pagedjax.models.layers import dot, project_to_vocab

TOKENS = [5, 250, 17, 3, 99, 201, 4, 4, 64, 130, 7]
DATA = Path(__file__).parents[1] / "data"


def logits_of(loaded, tokens=TOKENS):
    ids = jnp.asarray(tokens, jnp.int32)[None]
    positions = jnp.arange(len(tokens))[None]
    return np.asarray(loaded.model.head(loaded.model(ids, positions))[0])


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_gguf_in_every_format_gives_the_logits_of_its_dequantised_weights(tmp_path, kind):
    tiny = Tiny()
    loaded = load_model(write_gguf(tmp_path / "m.gguf", tiny, kind=kind))
    np.testing.assert_allclose(logits_of(loaded), oracle_logits(tiny, TOKENS), atol=2e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shards", [1, 3])
def test_safetensors_in_every_format_give_the_logits_of_their_weights(tmp_path, dtype, shards):
    tiny = Tiny(tied=False)
    loaded = load_model(write_hf(tmp_path / "hf", tiny, dtype=dtype, shards=shards))
    np.testing.assert_allclose(logits_of(loaded), oracle_logits(tiny, TOKENS), atol=2e-5)


def test_untied_gguf_uses_its_own_output_matrix(tmp_path):
    tiny = Tiny(tied=False)
    loaded = load_model(write_gguf(tmp_path / "m.gguf", tiny))
    assert not loaded.config.tie_embeddings
    np.testing.assert_allclose(logits_of(loaded), oracle_logits(tiny, TOKENS), atol=2e-5)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_llama3_scaling_of_rope_from_config_json(tmp_path, key):
    tiny = Tiny(rope_scaling=LLAMA3, theta=500000.0)
    config = {"rope_scaling": None, "rope_theta": None, key: LLAMA3 | {"rope_theta": 500000.0}}
    loaded = load_model(write_hf(tmp_path / "hf", tiny, config=config))
    np.testing.assert_allclose(logits_of(loaded), oracle_logits(tiny, TOKENS), atol=2e-5)
    plain = oracle_logits(Tiny(theta=500000.0), TOKENS)
    assert np.abs(logits_of(loaded) - plain).max() > 1e-3  # the scaling is seen at this length


def test_llama3_scaling_of_rope_from_the_tensor_of_a_gguf(tmp_path):
    tiny = Tiny(rope_scaling=LLAMA3)
    factors = inverse_frequencies(Tiny()) / inverse_frequencies(tiny)
    path = write_gguf(tmp_path / "m.gguf", tiny, extra={"rope_freqs.weight": factors.astype(np.float32)})
    np.testing.assert_allclose(logits_of(load_model(path)), oracle_logits(tiny, TOKENS), atol=2e-5)


@pytest.mark.parametrize("sizes", [{"heads": 3, "kv_heads": 1}, {"heads": 4, "kv_heads": 4}, {"heads": 8, "dim": 32}])
def test_other_groupings_of_heads(tmp_path, sizes):
    tiny = Tiny(**sizes)
    metadata = {"llama.attention.key_length": tiny.dim, "llama.attention.value_length": tiny.dim}
    loaded = load_model(write_gguf(tmp_path / "m.gguf", tiny, metadata=metadata))
    np.testing.assert_allclose(logits_of(loaded), oracle_logits(tiny, TOKENS), atol=3e-5)


def test_a_permuted_head_wider_than_a_read_is_undone_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("pagedjax.models.weights._READ_SIZE", 100)  # less than two rows
    monkeypatch.setattr("pagedjax.models.gguf_file._GROUP_SIZE", 64)
    monkeypatch.setattr("pagedjax.models.weights._TILE", 5)
    tiny = Tiny()
    loaded = load_model(write_gguf(tmp_path / "m.gguf", tiny, kind="Q4_1"))
    np.testing.assert_allclose(logits_of(loaded), oracle_logits(tiny, TOKENS), atol=2e-5)


def test_bfloat16_model_holds_bfloat16_weights_and_gives_float32_logits_near_the_oracle(tmp_path):
    tiny = Tiny()
    loaded = load_model(write_gguf(tmp_path / "m.gguf", tiny), dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(loaded.model))} == {jnp.dtype("bfloat16")}
    ours, oracle = logits_of(loaded), oracle_logits(tiny, TOKENS)
    assert ours.dtype == np.float32
    assert np.abs(ours - oracle).max() < 0.1 * oracle.std()


def test_one_row_of_bfloat16_agrees_with_the_same_row_among_others():
    x, w = np.random.default_rng(0).normal(size=(2, 96)), np.random.default_rng(1).normal(size=(96, 33))
    x, w = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16)
    np.testing.assert_allclose(
        np.asarray(dot(x[:1], w), np.float32), np.asarray(dot(x, w)[:1], np.float32), rtol=0.01, atol=0.05
    )


@pytest.mark.parametrize("num_rows", [1, 2, 7])
@pytest.mark.parametrize("vocab", [5, 128, 300, 1000])
def test_the_head_in_pieces_is_the_whole_product_at_any_vocabulary(monkeypatch, num_rows, vocab):
    monkeypatch.setattr("pagedjax.models.layers._PIECE_ROWS", 128)
    rng = np.random.default_rng(0)
    x, table = rng.normal(size=(num_rows, 24)).astype(np.float32), rng.normal(size=(vocab, 24)).astype(np.float32)
    out = project_to_vocab(jnp.asarray(x), jnp.asarray(table), jnp.dtype("float32"))
    np.testing.assert_allclose(np.asarray(out), x.astype(np.float64) @ table.T.astype(np.float64), atol=1e-5)


def test_positions_are_used_as_they_are_given():
    config = ModelConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16
    )
    model = Llama(config, rngs=nnx.Rngs(0))
    tokens, positions = jnp.arange(6)[None], jnp.arange(6)[None]
    shifted = model(tokens, positions + 100)  # RoPE is relative: a common shift changes nothing
    np.testing.assert_allclose(np.asarray(shifted), np.asarray(model(tokens, positions)), atol=1e-4)
    spread = model(tokens, positions * 3)
    assert np.abs(np.asarray(spread) - np.asarray(model(tokens, positions))).max() > 1e-3


def test_the_demo_models_logits_are_those_of_transformers():
    loaded = load_model("smollm2-135m", dtype="float32")
    reference = np.load(DATA / "logits.npz")
    logits = logits_of(loaded, reference["token_ids"])
    top = np.take_along_axis(logits, reference["top_ids"].astype(np.int64), axis=1)
    np.testing.assert_allclose(top, reference["top_logits"], atol=2e-3)
    np.testing.assert_allclose(logits[:, reference["column_ids"]], reference["column_logits"], atol=2e-3)
    assert loaded.config.num_parameters == 134_515_008
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(loaded.model))) == 134_515_008
