"""A tiny random model, and generation without any cache as the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax.models.config import ModelConfig
from pagedjax.models.llama import Llama

VOCABULARY = 97


@pytest.fixture(scope="session")
def tiny_model():
    config = ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=128,
    )
    return Llama(config, rngs=nnx.Rngs(1))


@pytest.fixture(scope="session")
def greedy_oracle(tiny_model):
    """Greedy tokens by running the whole sequence through the model, uncached, for every token."""
    graphdef, params = nnx.split(tiny_model)

    @jax.jit
    def logits(params, tokens):
        model = nnx.merge(graphdef, params)
        return model.head(model(tokens[None], jnp.arange(tokens.shape[0])[None]))[0]

    def generate(prompt, count):
        tokens = np.zeros(128, np.int32)
        tokens[: len(prompt)] = prompt
        for length in range(len(prompt), len(prompt) + count):
            tokens[length] = int(jnp.argmax(logits(params, jnp.asarray(tokens))[length - 1]))
        return tokens[len(prompt) : len(prompt) + count].tolist()

    return generate


@pytest.fixture
def prompts():
    """Six prompts of different lengths; some share a beginning."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, VOCABULARY, 19).tolist()
    tails = [rng.integers(0, VOCABULARY, n).tolist() for n in (1, 3, 7, 12)]
    return [shared + tail for tail in tails] + [rng.integers(0, VOCABULARY, n).tolist() for n in (1, 30)]
