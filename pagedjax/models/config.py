"""What a decoder looks like: the sizes and constants that GGUF metadata or a Hugging Face ``config.json`` give.

`ModelConfig` says everything that the maths needs and nothing about where it came from. Whatever would change
the maths in a way that the model does not know (another activation, biases, a sliding window, experts, an unknown
scaling of RoPE) is refused here, by name, rather than computed wrongly later.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedjax.models.errors import LoadError

__all__ = ["ARCHITECTURES", "ModelConfig", "config_from_gguf", "config_from_hf", "llama3_rope_factors", "read_json"]

ARCHITECTURES = ("llama",)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama family.

    Attributes:
        architecture: one of `ARCHITECTURES`.
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width of the feed-forward layer.
        num_layers: decoder layers.
        num_heads: query heads; a multiple of ``num_kv_heads``.
        num_kv_heads: key and value heads.
        head_dim: width of a head; even, because RoPE rotates pairs.
        max_position_embeddings: tokens that the model was trained to see.
        rms_norm_eps: added to the mean square in RMSNorm.
        rope_theta: base of the rotary frequencies.
        rope_factors: for each of the ``head_dim / 2`` frequencies what it is divided by; None for plain RoPE.
        tie_embeddings: the output head is the embedding.

    Raises:
        ValueError: a size below 1, or sizes that do not fit together.

    >>> config = ModelConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=4,
    ...                      num_kv_heads=2, head_dim=8)
    >>> config.num_parameters
    11360
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_factors: tuple[float, ...] | None = None
    tie_embeddings: bool = True
    architecture: str = "llama"

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)} but must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads} but must be a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim} but RoPE rotates pairs: it must be even")
        if self.rope_factors is not None and len(self.rope_factors) != self.head_dim // 2:
            raise ValueError(
                f"rope_factors has {len(self.rope_factors)} values but head_dim / 2 is {self.head_dim // 2}"
            )

    @property
    def num_parameters(self) -> int:
        """Numbers in all weights, the tied embedding counted once."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return embeddings + self.num_layers * layer + self.hidden_size


def llama3_rope_factors(
    head_dim: int, theta: float, *, factor: float, low_freq_factor: float, high_freq_factor: float, original_len: int
) -> tuple[float, ...]:
    """What Llama 3.1 divides each rotary frequency by: long waves by `factor`, short ones by 1, smoothly between.

    Follows ``_compute_llama3_parameters`` of Hugging Face transformers.

    Args:
        head_dim: width of a head.
        theta: base of the frequencies.
        factor: how much the longest waves are stretched.
        low_freq_factor: waves longer than ``original_len / low_freq_factor`` tokens are stretched in full.
        high_freq_factor: waves shorter than ``original_len / high_freq_factor`` tokens are left alone.
        original_len: context of the pre-training, in tokens.

    >>> llama3_rope_factors(4, 10000.0, factor=8, low_freq_factor=1, high_freq_factor=4, original_len=512)
    (1.0, 8.0)
    """
    factors = []
    for i in range(head_dim // 2):
        wave_len = 2 * math.pi * theta ** (2 * i / head_dim)
        if wave_len < original_len / high_freq_factor:
            factors.append(1.0)
        elif wave_len > original_len / low_freq_factor:
            factors.append(float(factor))
        else:
            smooth = (original_len / wave_len - low_freq_factor) / (high_freq_factor - low_freq_factor)
            factors.append(1.0 / ((1 - smooth) / factor + smooth))
    return tuple(factors)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        LoadError: no such file, no JSON, or JSON that is no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise LoadError(f"{path}: not readable as JSON ({error}); fetch the file again") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path}: holds a {type(value).__name__} where a JSON object belongs; fetch the file again")
    return value


class _Fields:
    """Typed access to a mapping; every complaint names the source and the key."""

    def __init__(self, source: str, values: Mapping[str, Any]):
        self.source = source
        self.values = values

    def number(self, key: str, default: float | None = None, *, integer: bool = False) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise LoadError(f"{self.source}: {key} is missing; the file does not describe a whole model")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise LoadError(f"{self.source}: {key} is {value!r} but must be a positive number")
        if integer and value != int(value):
            raise LoadError(f"{self.source}: {key} is {value!r} but must be a whole number")
        return int(value) if integer else float(value)

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self.number(key, default, integer=True))

    def refuse(self, key: str, why: str) -> None:
        """Raises if `key` has a value that counts as true: the model does not know what it asks for."""
        if self.values.get(key):
            raise LoadError(f"{self.source}: {key} is {self.values[key]!r}, which is not supported: {why}")

    def build(self, **sizes: Any) -> ModelConfig:
        try:
            return ModelConfig(**sizes)
        except ValueError as error:
            raise LoadError(f"{self.source}: {error}") from error


def _check_architecture(source: str, name: object) -> None:
    if name not in ARCHITECTURES:
        raise LoadError(f"{source}: architecture {name!r} is not known; known: {', '.join(ARCHITECTURES)}")


def config_from_gguf(
    metadata: Mapping[str, Any], *, tied: bool, rope_factors: tuple[float, ...] | None = None, source: str = "GGUF"
) -> ModelConfig:
    """Reads the config from the metadata of a GGUF file.

    Args:
        metadata: key to value, as `GGUFFile.metadata` has it.
        tied: the file has no output matrix of its own.
        rope_factors: content of the tensor ``rope_freqs.weight`` (Llama 3.1 and later), if there is one.
        source: what error messages call the file.

    Raises:
        LoadError: an unknown architecture, a missing or senseless value, or a feature that is not supported.
    """
    _check_architecture(source, metadata.get("general.architecture"))
    fields = _Fields(source, metadata)
    hidden, heads = fields.integer("llama.embedding_length"), fields.integer("llama.attention.head_count")
    head_dim = fields.integer("llama.attention.key_length", hidden // heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            raise LoadError(
                f"{source}: {key} is {metadata[key]} but a head has {head_dim}; only equal sizes are supported"
            )
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise LoadError(
            f"{source}: llama.rope.scaling.type is {scaling!r}; supported: none, and llama3 (tensor rope_freqs.weight)"
        )
    fields.refuse("llama.expert_count", "mixtures of experts are not")
    fields.refuse("llama.attention.sliding_window", "this decoder attends to the whole context")
    tokens = metadata.get("tokenizer.ggml.tokens")
    return fields.build(
        vocab_size=fields.integer("llama.vocab_size", len(tokens) if tokens else None),
        hidden_size=hidden,
        intermediate_size=fields.integer("llama.feed_forward_length"),
        num_layers=fields.integer("llama.block_count"),
        num_heads=heads,
        num_kv_heads=fields.integer("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=fields.integer("llama.context_length"),
        rms_norm_eps=fields.number("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("llama.rope.freq_base", 10000.0),
        rope_factors=rope_factors,
        tie_embeddings=tied,
    )


def config_from_hf(folder: Path | str) -> ModelConfig:
    """Reads the config from the ``config.json`` of a Hugging Face folder.

    Raises:
        LoadError: no readable ``config.json``, an unknown architecture, a missing or senseless value, or a feature
            that is not supported.
    """
    path = Path(folder) / "config.json"
    values = read_json(path)
    source = str(path)
    _check_architecture(source, values.get("model_type"))
    fields = _Fields(source, values)
    for key in ("attention_bias", "mlp_bias"):
        fields.refuse(key, "products have no bias here")
    fields.refuse("sliding_window", "this decoder attends to the whole context")
    fields.refuse("rope_interleaved", "RoPE rotates halves here")
    fields.refuse("quantization_config", "load unquantised weights, or a GGUF file")
    if values.get("hidden_act", "silu") != "silu":
        raise LoadError(f"{source}: hidden_act is {values['hidden_act']!r}; supported: silu")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", hidden // heads)
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise LoadError(f"{source}: rope_scaling is {rope!r} but must be an object or null")
    theta = _Fields(source, {**values, **rope}).number("rope_theta", 10000.0)
    return fields.build(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_factors=_hf_rope_factors(source, rope, head_dim, theta),
        tie_embeddings=bool(values.get("tie_word_embeddings", False)),
    )


def _hf_rope_factors(source: str, rope: Mapping[str, Any], head_dim: int, theta: float) -> tuple[float, ...] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    fields = _Fields(f"{source}: RoPE scaling", rope)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise LoadError(f"{source}: partial_rotary_factor is {rope['partial_rotary_factor']!r}; supported: 1.0")
    if kind in ("default", "none"):
        return None
    if kind != "llama3":
        raise LoadError(f"{source}: RoPE scaling {kind!r} is not known; known: default, llama3")
    return llama3_rope_factors(
        head_dim,
        theta,
        factor=fields.number("factor"),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_len=fields.integer("original_max_position_embeddings"),
    )
