"""Tiny Llama models as files: weights, a byte-level tokenizer, writers of GGUF and Hugging Face folders, the oracle.

The oracle is Llama in float64 NumPy, written from the formulas and not from our model.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize, quantize
from safetensors.numpy import save_file

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2"]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def byte_tokens() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


TOKENS = [*SPECIAL, *byte_tokens(), *(merge.replace(" ", "") for merge in MERGES)]


@dataclass
class Tiny:
    """A tiny model: sizes, and weights in Hugging Face's names and layout, float32."""

    tied: bool = True
    rope_scaling: dict | None = None
    hidden: int = 64
    ff: int = 96
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    vocab: int = 272
    eps: float = 1e-5
    theta: float = 10000.0
    weights: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)

        def matrix(out: int, width: int) -> np.ndarray:
            return (rng.normal(size=(out, width)) / np.sqrt(width)).astype(np.float32)

        w = self.weights
        w["model.embed_tokens.weight"] = rng.normal(size=(self.vocab, self.hidden)).astype(np.float32)
        w["model.norm.weight"] = rng.uniform(0.5, 1.5, self.hidden).astype(np.float32)
        if not self.tied:
            w["lm_head.weight"] = matrix(self.vocab, self.hidden)
        for i in range(self.layers):
            p = f"model.layers.{i}."
            w[p + "input_layernorm.weight"] = rng.uniform(0.5, 1.5, self.hidden).astype(np.float32)
            w[p + "post_attention_layernorm.weight"] = rng.uniform(0.5, 1.5, self.hidden).astype(np.float32)
            w[p + "self_attn.q_proj.weight"] = matrix(self.heads * self.dim, self.hidden)
            w[p + "self_attn.k_proj.weight"] = matrix(self.kv_heads * self.dim, self.hidden)
            w[p + "self_attn.v_proj.weight"] = matrix(self.kv_heads * self.dim, self.hidden)
            w[p + "self_attn.o_proj.weight"] = matrix(self.hidden, self.heads * self.dim)
            w[p + "mlp.gate_proj.weight"] = matrix(self.ff, self.hidden)
            w[p + "mlp.up_proj.weight"] = matrix(self.ff, self.hidden)
            w[p + "mlp.down_proj.weight"] = matrix(self.hidden, self.ff)

    def hf_config(self) -> dict:
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.ff,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.dim,
            "max_position_embeddings": 512,
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "rope_scaling": self.rope_scaling,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "eos_token_id": 2,
        }


# --- the oracle -----------------------------------------------------------------------------------------------------


def inverse_frequencies(tiny: Tiny) -> np.ndarray:
    frequencies = tiny.theta ** -(np.arange(tiny.dim // 2) * 2 / tiny.dim)
    if tiny.rope_scaling is None:
        return frequencies
    s = tiny.rope_scaling
    out = []
    for f in frequencies:
        turns = s["original_max_position_embeddings"] * f / (2 * np.pi)  # in the original context
        blend = (turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
        blend = min(1.0, max(0.0, blend))
        out.append((1 - blend) * f / s["factor"] + blend * f)
    return np.array(out)


def oracle_logits(tiny: Tiny, tokens: list[int]) -> np.ndarray:
    """Logits ``[tokens, vocab]`` of plain causal Llama in float64."""
    w = {name: value.astype(np.float64) for name, value in tiny.weights.items()}
    angles = np.arange(len(tokens))[:, None] * inverse_frequencies(tiny)
    cos, sin = np.cos(angles), np.sin(angles)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + tiny.eps) * w[name]

    def turn(x: np.ndarray) -> np.ndarray:
        a, b = x[:, : tiny.dim // 2], x[:, tiny.dim // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(tiny.layers):
        p = f"model.layers.{i}."
        h = norm(x, p + "input_layernorm.weight")
        q, k, v = (h @ w[p + f"self_attn.{name}_proj.weight"].T for name in "qkv")
        heads = []
        for head in range(tiny.heads):
            kv = head // (tiny.heads // tiny.kv_heads)
            own, shared = slice(head * tiny.dim, (head + 1) * tiny.dim), slice(kv * tiny.dim, (kv + 1) * tiny.dim)
            scores = turn(q[:, own]) @ turn(k[:, shared]).T / np.sqrt(tiny.dim)
            scores = np.where(np.tri(len(tokens), dtype=bool), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, shared])
        x = x + np.concatenate(heads, axis=1) @ w[p + "self_attn.o_proj.weight"].T
        h = norm(x, p + "post_attention_layernorm.weight")
        gate, up = h @ w[p + "mlp.gate_proj.weight"].T, h @ w[p + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[p + "mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ w["model.embed_tokens.weight" if tiny.tied else "lm_head.weight"].T


# --- writers --------------------------------------------------------------------------------------------------------

GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[part.removesuffix('.weight')]}.weight"


def write_gguf(
    path: Path,
    tiny: Tiny,
    *,
    kind: str = "F32",
    tokens: list[str] = TOKENS,
    metadata: dict | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """Writes `tiny` as GGUF, its matrices as `kind`; `tiny.weights` become what the file says, rounding included.

    Args:
        metadata: overrides; a value of None leaves the key out.
        drop: GGUF names that are left out.
        extra: further tensors.
    """
    writer = gguf.GGUFWriter(path, "llama")
    values = {
        "llama.block_count": tiny.layers,
        "llama.context_length": 512,
        "llama.embedding_length": tiny.hidden,
        "llama.feed_forward_length": tiny.ff,
        "llama.attention.head_count": tiny.heads,
        "llama.attention.head_count_kv": tiny.kv_heads,
        "llama.attention.layer_norm_rms_epsilon": tiny.eps,
        "llama.rope.freq_base": tiny.theta,
        "llama.rope.dimension_count": tiny.dim,
        "llama.vocab_size": tiny.vocab,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
        "tokenizer.ggml.merges": MERGES,
    } | (metadata or {})
    for key, value in values.items():
        if value is None:
            continue
        if key == "general.architecture":
            writer.kv_data[0][key].value = value
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    number = gguf.GGMLQuantizationType[kind]
    for name, value in tiny.weights.items():
        if gguf_name(name) in drop:
            continue
        stored = value
        if "q_proj" in name or "k_proj" in name:
            n = tiny.heads if "q_proj" in name else tiny.kv_heads
            stored = value.reshape(n, 2, tiny.dim // 2, -1).swapaxes(1, 2).reshape(value.shape)
        if value.ndim == 1:
            writer.add_tensor(gguf_name(name), stored)
            continue
        packed = quantize(np.ascontiguousarray(stored), number)
        if kind == "F16":
            writer.add_tensor(gguf_name(name), packed)
        else:
            writer.add_tensor(gguf_name(name), packed, raw_dtype=number)
        tiny.weights[name] = dequantize(quantize(value, number), number)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokenizer_json() -> dict:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            | {"special": True}
            for i, t in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(TOKENS)},
            "merges": MERGES,
        },
    }


def write_hf(
    folder: Path, tiny: Tiny, *, dtype: type = np.float32, shards: int = 1, config: dict | None = None
) -> Path:
    """Writes `tiny` as a Hugging Face folder, matrices cast to `dtype`; `config` overrides ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny.hf_config() | (config or {})))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    settings = {"bos_token": SPECIAL[1], "eos_token": {"content": SPECIAL[2]}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    stored = {name: value.astype(dtype) for name, value in tiny.weights.items()}
    if shards == 1:
        save_file(stored, folder / "model.safetensors")
    else:
        names = sorted(stored)
        files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
        for file in set(files.values()):
            save_file({name: stored[name] for name in names if files[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    tiny.weights = {name: value.astype(np.float32) for name, value in stored.items()}
    return folder
