"""The demo model's greedy tokens against Hugging Face transformers in float32, whatever the cache's shape."""

import json
from pathlib import Path

import numpy as np
import pytest

from pagedjax.engine import LLM, EngineConfig, SamplingParams

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "greedy.json").read_text())
GREEDY_64 = SamplingParams(max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded():
    from pagedjax.models import load_model

    return load_model("smollm2-135m", dtype="float32")


def make_llm(loaded, **settings):
    settings = {"max_rows": 4, "max_len": 256, "max_prefill_tokens": 64} | settings
    return LLM(loaded.model, loaded.tokenizer, EngineConfig(**settings), max_len=256)


@pytest.mark.parametrize(
    ("block_size", "chunk"), [(32, 512), (1, 64), (16, 7), (128, 64)], ids=lambda value: str(value)
)
def test_greedy_tokens_equal_transformers_alone_and_together(loaded, block_size, chunk):
    llm = make_llm(loaded, block_size=block_size, max_prefill_tokens=chunk)
    prompts = [case["prompt_ids"] for case in REFERENCE]
    wanted = [case["greedy_ids"] for case in REFERENCE]
    together = llm.generate(prompts, GREEDY_64)
    assert [output.completions[0].token_ids for output in together] == wanted
    again = llm.generate(prompts[::-1], GREEDY_64)  # now every prompt hits, to its last token but one
    assert [output.completions[0].token_ids for output in again] == wanted[::-1]
    assert [output.num_cached_tokens for output in again] == [len(prompt) - 1 for prompt in prompts[::-1]]
    if block_size == 32:
        llm.engine.reset_prefix_cache()
        alone = [llm.generate(prompt, GREEDY_64)[0].completions[0].token_ids for prompt in prompts]
        assert alone == wanted


def test_text_prompts_give_the_same_tokens_and_streamed_text_only_grows(loaded):
    llm = make_llm(loaded, block_size=32, max_prefill_tokens=512)
    prompts = [case["prompt"] for case in REFERENCE]
    last = [""] * len(prompts)
    for outputs in llm.stream(prompts, GREEDY_64):
        for place, output in enumerate(outputs):
            text = output.completions[0].text
            assert text.startswith(last[place])
            last[place] = text
    for case, output, text in zip(REFERENCE, outputs, last, strict=True):
        assert output.prompt_token_ids == case["prompt_ids"]
        assert output.completions[0].token_ids == case["greedy_ids"]
        assert text == llm.tokenizer.decode(case["greedy_ids"])


def test_stop_strings_end_the_text_before_them(loaded):
    llm = make_llm(loaded, block_size=32, max_prefill_tokens=512)
    case = REFERENCE[1]
    full = llm.tokenizer.decode(case["greedy_ids"])
    [output] = llm.generate(case["prompt"], SamplingParams(max_tokens=64, stop=("n == 0", "else:")))
    assert output.completions[0].text == full[: full.index("else:")]
    assert output.completions[0].finish_reason == "stop"


def test_bfloat16_logits_pick_nearly_the_same_tokens(loaded):
    """bfloat16 cannot be held to float32's tokens; the first of each prompt has margins that it keeps."""
    from pagedjax.models import load_model

    half = load_model("smollm2-135m", dtype="bfloat16")
    llm = LLM(half.model, half.tokenizer, EngineConfig(max_rows=4, max_len=256, max_prefill_tokens=64), max_len=256)
    outputs = llm.generate([case["prompt_ids"] for case in REFERENCE], SamplingParams(max_tokens=1))
    found = [output.completions[0].token_ids[0] for output in outputs]
    assert found == [case["greedy_ids"][0] for case in REFERENCE]
    assert {array.dtype for array in llm.engine.runner.state.pages} == {np.dtype("bfloat16")}
