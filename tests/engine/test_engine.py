"""The engine against generation without a cache, and what it does with pools too small, bad requests and aborts."""

import numpy as np
import pytest

from pagedjax.engine import Engine, EngineConfig, RequestError, SamplingParams


@pytest.fixture(scope="module")
def engine_of(tiny_model):
    """Engines by their settings, compiled once for all tests; each test gets one with an empty prefix cache."""
    engines = {}

    def make(**settings):
        settings = {"block_size": 4, "max_rows": 4, "max_prefill_tokens": 16, "compilation_cache": ""} | settings
        key = tuple(sorted(settings.items()))
        if key not in engines:
            engines[key] = Engine(tiny_model, None, EngineConfig(**settings), max_len=128, vocab_size=97)
        engines[key].reset_prefix_cache()
        return engines[key]

    return make


def change_of(engine, function):
    """What a call adds to the engine's counters."""
    before = engine.stats().to_dict()
    function()
    return {name: value - before[name] for name, value in engine.stats().to_dict().items()}


def run(engine, prompts, params):
    names = [engine.add_request(None, prompt, params) for prompt in prompts]
    done = {}
    while len(done) < len(names):
        done |= {output.request_id: output for output in engine.step()}
    return [done[name] for name in names]


def assert_all_blocks_came_back(engine):
    usage = engine.manager.usage()
    assert usage.num_held == 0
    assert usage.num_free == engine.manager.num_blocks - 1


@pytest.mark.parametrize(("block_size", "chunk"), [(1, 16), (4, 3), (16, 64)])
def test_greedy_tokens_equal_generation_without_a_cache(engine_of, greedy_oracle, prompts, block_size, chunk):
    engine = engine_of(block_size=block_size, max_prefill_tokens=chunk)
    outputs = run(engine, prompts, SamplingParams(max_tokens=12))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.completions[0].token_ids == greedy_oracle(prompt, 12)
        assert output.completions[0].finish_reason == "length"
    assert_all_blocks_came_back(engine)


def test_a_second_round_hits_the_cache_and_says_the_same(engine_of, prompts):
    engine = engine_of()
    first = run(engine, prompts, SamplingParams(max_tokens=8))
    second = run(engine, prompts, SamplingParams(max_tokens=8))
    for before, after in zip(first, second, strict=True):
        assert after.completions == before.completions
        assert after.num_cached_tokens == len(after.prompt_token_ids) - 1
    assert_all_blocks_came_back(engine)


def test_a_pool_too_small_for_all_preempts_and_says_the_same(engine_of, greedy_oracle, prompts):
    engine = engine_of(num_blocks=14)
    outputs = []
    change = change_of(engine, lambda: outputs.extend(run(engine, prompts, SamplingParams(max_tokens=12))))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.completions[0].token_ids == greedy_oracle(prompt, 12)
    assert change["num_preemptions"] > 0
    assert_all_blocks_came_back(engine)


def test_requests_that_arrive_together_compute_their_common_prefix_once(engine_of):
    engine = engine_of(max_prefill_tokens=64, block_size=16)
    prompts = [[*range(40), 50 + i] for i in range(4)]
    outputs = []
    change = change_of(engine, lambda: outputs.extend(run(engine, prompts, SamplingParams(max_tokens=2))))
    assert sorted(output.num_cached_tokens for output in outputs) == [0, 40, 40, 40]
    assert change["num_computed_prefill_tokens"] == 41 + 3


@pytest.mark.parametrize("length", [8, 10])
def test_n_samples_prefill_once_and_copy_only_an_unfinished_block(engine_of, greedy_oracle, length):
    engine = engine_of()
    prompt = list(range(length))
    outputs = []
    change = change_of(engine, lambda: outputs.extend(run(engine, [prompt], SamplingParams(max_tokens=6, n=3))))
    assert [c.token_ids for c in outputs[0].completions] == [greedy_oracle(prompt, 6)] * 3
    assert change["num_computed_prefill_tokens"] == length
    assert change["num_copies"] == (0 if length % 4 == 0 else 2)
    assert_all_blocks_came_back(engine)


def test_samples_with_a_seed_repeat_and_differ_from_each_other(engine_of, prompts):
    params = SamplingParams(max_tokens=10, n=3, temperature=1.5, top_k=40, top_p=0.95, seed=7)
    alone = [run(engine_of(), [prompt], params)[0] for prompt in prompts[:2]]
    together = run(engine_of(num_blocks=14), prompts[:2], params)
    assert [o.completions for o in alone] == [o.completions for o in together]
    texts = {tuple(c.token_ids) for c in alone[0].completions}
    assert len(texts) == 3


def test_a_stop_token_ends_a_completion_and_belongs_to_it(engine_of, greedy_oracle, prompts):
    tokens = greedy_oracle(prompts[0], 12)
    stop = tokens[5]
    [output] = run(engine_of(), prompts[:1], SamplingParams(max_tokens=12, stop_token_ids=(stop,)))
    assert output.completions[0].token_ids == tokens[: tokens.index(stop) + 1]
    assert output.completions[0].finish_reason == "stop"


def test_an_abort_gives_the_blocks_back_and_leaves_the_neighbours_alone(engine_of, greedy_oracle, prompts):
    engine = engine_of()
    for name, prompt in zip("abc", prompts[1:4], strict=True):
        engine.add_request(name, prompt, SamplingParams(max_tokens=12, n=2))
    done = {}
    for count in range(200):
        if count == 5:
            engine.abort("b")
        done |= {output.request_id: output for output in engine.step()}
        if not engine.has_work:
            break
    assert [c.finish_reason for c in done["b"].completions] == ["abort", "abort"]
    for name, prompt in (("a", prompts[1]), ("c", prompts[3])):
        assert done[name].completions[0].token_ids == greedy_oracle(prompt, 12)
    assert_all_blocks_came_back(engine)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([0, 97], {}, "token id 97 is out of the vocabulary"),
        ([-1], {}, "token id -1 is out of the vocabulary"),
        ([0.5], {}, "whole token ids"),
        ([[1, 2]], {}, "flat list"),
        ("text", {}, "no tokenizer"),
        ([0] * 128, {}, "max_len is 128"),
        ([0], {"n": 5}, "n is 5 but max_rows is 4"),
        ([0] * 60, {"max_tokens": 60}, "need 30 blocks of 4 tokens but the pool has 19"),
        ([0], {"stop": "x"}, "stop strings need a tokenizer"),
    ],
)
def test_bad_requests_are_refused_and_change_nothing(engine_of, greedy_oracle, prompts, prompt, params, message):
    engine = engine_of(num_blocks=20)
    engine.add_request("good", prompts[0], SamplingParams(max_tokens=4))
    with pytest.raises(RequestError, match=message):
        engine.add_request("bad", prompt, SamplingParams(**params))
    with pytest.raises(RequestError, match="'good' is there already"):
        engine.add_request("good", prompts[0])
    done = []
    while engine.has_work:
        done += engine.step()
    assert [output.request_id for output in done] == ["good"]
    assert done[0].completions[0].token_ids == greedy_oracle(prompts[0], 4)


def test_a_salt_keeps_caches_apart(engine_of, prompts):
    engine = engine_of()
    for salt, hits in (("x", 0), ("y", 0), ("x", len(prompts[3]) - 1)):
        engine.add_request("r", prompts[3], SamplingParams(max_tokens=2), salt=salt)
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        assert outputs[0].num_cached_tokens == hits


def test_steps_of_the_same_shape_compile_once(engine_of, prompts):
    engine = engine_of()
    run(engine, prompts, SamplingParams(max_tokens=5))
    before = engine.stats().num_compilations
    run(engine, [(np.asarray(p) + 1) % 97 for p in prompts], SamplingParams(max_tokens=5, temperature=1.0))
    assert engine.stats().num_compilations == before
