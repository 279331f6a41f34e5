"""The command line: what it prints, and one clear line with exit code 2 for whatever a user gets wrong."""

import json
import struct

import pytest

from pagedjax.cli import main
from pagedjax.models import find_demo_model


def run(capsys, *arguments):
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def truncated(tmp_path):
    path = tmp_path / "truncated.gguf"
    path.write_bytes(find_demo_model().read_bytes()[:50_000_000])
    return path


@pytest.fixture
def unknown_architecture(tmp_path):
    path = tmp_path / "unknown.gguf"
    text = b"general.architecture"
    name = b"perceptron"
    header = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)
    path.write_bytes(header + struct.pack("<Q", len(text)) + text + struct.pack("<IQ", 8, len(name)) + name)
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "missing.gguf"], "missing.gguf"),
        (["--num-blocks", "1"], "num_blocks is 1"),
        (["--block-size", "0"], "block_size is 0"),
        (["--kv-memory", "much"], "kv_memory is 'much'"),
        (["--top-p", "0"], "top_p is 0.0"),
        (["-n", "0"], "n is 0"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--prompts-file", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line_and_exit_code_2(capsys, arguments, message):
    code, out, err = run(capsys, "generate", *arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.strip().count("\n") == 0


def test_broken_model_files_are_one_line_and_exit_code_2(capsys, truncated, unknown_architecture):
    for path, message in ((truncated, "truncated"), (unknown_architecture, "perceptron")):
        code, out, err = run(capsys, "generate", "--model", str(path))
        assert (code, out) == (2, "")
        assert message in err
        assert str(path) in err
        assert err.strip().count("\n") == 0


def test_a_file_in_place_of_the_cache_folder_is_one_line_and_exit_code_2(capsys, monkeypatch, tmp_path):
    import jax

    file = tmp_path / "file"
    file.write_text("in the way")
    monkeypatch.setenv("PAGEDJAX_CACHE", str(file))
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        code, out, err = run(capsys, "generate", "--max-tokens", "1")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert (code, out) == (2, "")
    assert str(file) in err
    assert "PAGEDJAX_CACHE" in err


def test_a_prompt_that_is_too_long_and_a_pool_that_is_too_small_say_so(capsys):
    code, _, err = run(capsys, "generate", "--raw", "--prompt", "word " * 9000)
    assert code == 2
    assert "9,000 tokens" in err or "9000 tokens" in err or "tokens but max_len is 8192" in err
    code, _, err = run(capsys, "generate", "--num-blocks", "2", "--prompt", "hello")
    assert code == 2
    assert "lower max_tokens or give the pool more memory" in err


def test_json_has_outputs_and_stats(capsys, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "def fibonacci(n):\\n"}\n')
    arguments = ["--raw", "--prompt", "The capital of France is", "--prompts-file", str(file), "--max-tokens", "4"]
    code, out, _ = run(capsys, "generate", *arguments, "--json", "--ignore-eos", "-n", "2", "--kv-memory", "64MiB")
    assert code == 0
    result = json.loads(out)
    assert [output["prompt"] for output in result["outputs"]] == ["The capital of France is", "def fibonacci(n):\n"]
    first = result["outputs"][0]
    assert first["prompt_token_ids"] == [504, 3575, 282, 4649, 314]
    assert first["num_cached_tokens"] == 0
    assert [c["token_ids"] for c in first["completions"]] == [[7042, 30, 198, 198]] * 2
    assert first["completions"][0] == {
        "token_ids": [7042, 30, 198, 198],
        "text": " Paris.\n\n",
        "finish_reason": "length",
    }
    assert result["stats"]["num_generated_tokens"] == 16


def test_plain_text_files_hold_a_prompt_a_line(tmp_path):
    from pagedjax.commands.generate import read_prompts

    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    assert read_prompts(["zero"], str(file)) == ["zero", "one", "two"]
    file.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(ValueError, match="prompt 2 of"):
        read_prompts(None, str(file))
    file.write_text("\n")
    with pytest.raises(ValueError, match="has no prompts"):
        read_prompts(None, str(file))
