"""``pagedjax bench engine``: steps of a real model through the engine, and how far from the machine's limits they are.

The limit of a step is the time of its matrix products alone (`limits.ProductsAlone`, each weight read once) plus the
bytes of KV that it must read over the measured memory bandwidth. Both are measured in turn with the steps, so that
a disturbance of the machine meets both sides.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pagedjax.bench.limits import ProductsAlone, read_bandwidth
from pagedjax.bench.records import Record
from pagedjax.bench.timing import interquartile_range
from pagedjax.engine import Engine, EngineConfig, SamplingParams
from pagedjax.models import Loaded, ModelConfig, load_model

DECODES = ((1, 64), (1, 512), (8, 64), (8, 512), (32, 64), (32, 512))  # sequences, context at the start
PREFILL_TOKENS = 512
ROUNDS = 5


def run(
    model: str, *, dtypes: tuple[str, ...] = ("float32", "bfloat16"), block_size: int | None = None, quick: bool = False
) -> Iterator[Record]:
    """Prefill of 512 tokens and decode of 1, 8 and 32 sequences at two contexts, for each dtype.

    Yields, for each case, records in tokens/s and ms, and the ratio of a step to its limit.
    """
    decodes = DECODES[::3] if quick else DECODES
    rounds = 2 if quick else ROUNDS
    for dtype in dtypes:
        loaded = load_model(model, dtype=dtype)
        bandwidth = read_bandwidth()
        yield _record("bandwidth", [bandwidth / 1e9], "GB/s", dtype=dtype)
        yield from _prefill(loaded, dtype, block_size, rounds)
        for batch, context in decodes:
            yield from _decode(loaded, dtype, batch, context, block_size, bandwidth, rounds)


def run_workload(
    model: str, path: str, *, dtype: str = "float32", block_size: int | None = None, max_rows: int = 32
) -> Iterator[Record]:
    """A whole workload, requests all at once: output tokens over the time from the first step to the last token.

    Args:
        path: JSON ``{"requests": [{"prompt_ids", "max_tokens"}, …]}``; stop tokens are ignored.
    """
    try:
        requests = [(r["prompt_ids"], int(r["max_tokens"])) for r in json.loads(Path(path).read_text())["requests"]]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f'{path} is no workload: {error}; it needs "requests" with "prompt_ids", "max_tokens"'
        ) from None
    loaded = load_model(model, dtype=dtype)
    for warm in (True, False):
        engine = _engine(loaded, block_size, max_rows)
        for prompt, count in requests[: 2 * max_rows if warm else None]:
            engine.add_request(None, prompt, SamplingParams(max_tokens=count, ignore_eos=True))
        start = time.perf_counter()
        produced = 0
        while engine.has_work:
            produced += sum(len(c.token_ids) for output in engine.step() for c in output.completions)
        seconds = time.perf_counter() - start
    stats = engine.stats()
    common: dict[str, Any] = {"dtype": dtype, "max_rows": max_rows, "requests": len(requests)}
    yield _record("workload", [produced / seconds], "tokens/s", **common)
    yield _record("workload_prefix_hits", [float(stats.num_cached_tokens)], "tokens", **common)


def product_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """(in, out) of every product of a step, in order, the head last; those that read the same input are one."""
    heads = config.num_heads * config.head_dim
    layer = [
        (config.hidden_size, heads + 2 * config.num_kv_heads * config.head_dim),
        (heads, config.hidden_size),
        (config.hidden_size, 2 * config.intermediate_size),
        (config.intermediate_size, config.hidden_size),
    ]
    return [*layer * config.num_layers, (config.hidden_size, config.vocab_size)]


def _engine(loaded: Loaded, block_size: int | None, max_rows: int, max_len: int = 1024) -> Engine:
    config = EngineConfig(block_size=block_size, max_rows=max_rows, max_len=max_len, kv_memory="3GiB")
    return Engine(loaded.model, loaded.tokenizer, config, vocab_size=loaded.config.vocab_size)


def _prefill(loaded: Loaded, dtype: str, block_size: int | None, rounds: int) -> Iterator[Record]:
    engine = _engine(loaded, block_size, 1)
    products = ProductsAlone(product_shapes(loaded.config), PREFILL_TOKENS, dtype, head_rows=1)
    rng = np.random.default_rng(0)
    steps, alone = [], []
    for turn in range(rounds + 1):
        engine.add_request(None, rng.integers(100, 40_000, PREFILL_TOKENS), SamplingParams(max_tokens=1))
        start = time.perf_counter()
        while engine.has_work:
            engine.step()
        took = time.perf_counter() - start
        if turn:  # the first one compiled
            steps.append(took)
            alone.append(products.time_s())
    yield from _case("prefill", PREFILL_TOKENS, steps, alone, 0.0, dtype=dtype, batch=1, context_start=0)


def _decode(
    loaded: Loaded, dtype: str, batch: int, context: int, block_size: int | None, bandwidth: float, rounds: int
) -> Iterator[Record]:
    engine = _engine(loaded, block_size, batch)
    products = ProductsAlone(product_shapes(loaded.config), batch, dtype, head_rows=batch)
    rng = np.random.default_rng(batch)
    each = 128 // rounds
    params = SamplingParams(max_tokens=each * rounds + 16, ignore_eos=True)
    for _ in range(batch):
        engine.add_request(None, rng.integers(100, 40_000, context), params)
    while len(engine.scheduler.running) < batch or engine.stats().num_generated_tokens < 4 * batch:
        engine.step()
    token_bytes = engine.runner.spec.token_bytes
    steps, alone, read = [], [], []
    for _ in range(rounds):
        before = int(engine.manager.num_scheduled.sum())
        start = time.perf_counter()
        for _ in range(each):
            engine.step()
        jax.block_until_ready(engine.runner.state.last_tokens)
        steps.append((time.perf_counter() - start) / each)
        after = int(engine.manager.num_scheduled.sum())
        read.append((before + after) / 2 * token_bytes / bandwidth)
        alone.append(products.time_s())
    yield from _case(
        "decode", batch, steps, alone, statistics.median(read), dtype=dtype, batch=batch, context_start=context
    )


def _case(
    case: str, tokens: int, steps: list[float], alone: list[float], kv_s: float, **parameters: Any
) -> Iterator[Record]:
    floors = [products + kv_s for products in alone]
    ratios = [step / floor for step, floor in zip(steps, floors, strict=True)]
    yield _record(case, [tokens / step for step in steps], "tokens/s", **parameters)
    yield _record(f"{case}_step", [step * 1e3 for step in steps], "ms", **parameters)
    yield _record(f"{case}_products_alone", [products * 1e3 for products in alone], "ms", **parameters)
    yield _record(f"{case}_kv_over_bandwidth", [kv_s * 1e3], "ms", **parameters)
    yield _record(f"{case}_step_over_limit", ratios, "ratio", **parameters)


def _record(case: str, values: list[float], unit: str, **parameters: Any) -> Record:
    return Record(
        bench="engine",
        case=case,
        parameters=parameters,
        value=statistics.median(values),
        unit=unit,
        repeats=len(values),
        spread=interquartile_range(values),
    )
