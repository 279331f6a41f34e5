"""The engine: continuous batching over the paged cache.

A step is scheduled and dispatched while the device still runs the one before; its tokens are read one step
late. Cache bookkeeping follows that order: `commit` when a step has been dispatched, `settle` when its tokens are
known.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from flax import nnx

from pagedjax.cache import KVCacheManager
from pagedjax.engine import compile_cache
from pagedjax.engine.buckets import Buckets
from pagedjax.engine.config import ACCELERATOR_BLOCK_SIZE, CPU_BLOCK_SIZE, DEFAULT_KV_BYTES, EngineConfig
from pagedjax.engine.request import Completion, Request, RequestOutput, Sequence, Status
from pagedjax.engine.runner import Runner
from pagedjax.engine.sampling_params import MAX_SEED, SamplingParams
from pagedjax.engine.scheduler import NeedSettleError, Scheduler, rows_of
from pagedjax.engine.stats import EngineStats, Meter
from pagedjax.engine.step import StepOutput
from pagedjax.engine.text import TextStream
from pagedjax.nnx import cache_layers
from pagedjax.paged.attention import default_placement
from pagedjax.paged.pages import PagesSpec


class RequestError(ValueError):
    """A request that the engine cannot serve; nothing was changed."""


@dataclass
class _InFlight:
    """A dispatched step whose tokens were not read yet."""

    step_id: int
    samples: list[Sequence]
    places: np.ndarray
    output: StepOutput
    is_prefill: bool
    dispatched_s: float
    ready_s: float | None = None


@dataclass(eq=False)
class _Reader:
    """What a request's tokens become on the host: text for each sequence."""

    decoders: list[Any] = field(default_factory=list)
    streams: list[TextStream] = field(default_factory=list)


class Engine:
    """Runs a model for many requests at once.

    Args:
        model: an NNX model: ``model(tokens[1, T], positions[1, T]) -> hidden[1, T, ...]`` and
            ``model.head(hidden) -> logits``, attending through `pagedjax.nnx.PagedAttention`.
        tokenizer: needed for text prompts and text outputs; `None` works with token ids only.
        config: sizes and limits.
        max_len: the model's own limit of tokens in a sequence, where it has one.
        vocab_size: token ids must be below it; `None` does not check.

    Raises:
        ValueError: sizes that do not fit together.
        CacheFolderError: the folder of the compilation cache cannot be used.
    """

    def __init__(
        self,
        model: nnx.Module,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        *,
        max_len: int | None = None,
        vocab_size: int | None = None,
    ):
        self.config = config = config or EngineConfig()
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        compile_cache.enable(config.compilation_cache)
        self.max_len = self._length_limit(max_len)
        spec = self._pages_spec(model)
        self.manager = KVCacheManager(
            spec.num_blocks,
            spec.block_size,
            max_rows=config.max_rows,
            max_len=self.max_len,
            enable_prefix_caching=config.enable_prefix_caching,
            min_partial_hit=config.min_partial_hit,
        )
        on_cpu = jax.default_backend() == "cpu"
        min_decodes = 2 if on_cpu and spec.dtype.itemsize == 2 else 1
        buckets = Buckets(
            max_rows=config.max_rows,
            max_prefill_tokens=min(config.max_prefill_tokens, self.max_len),
            min_decodes=min_decodes,
        )
        self.scheduler = Scheduler(self.manager, buckets.prefill_tokens[-1], buckets.max_prefills)
        max_blocks = -(-self.max_len // spec.block_size)
        self.runner = Runner(model, spec, default_placement(), buckets, max_blocks)
        self._requests: dict[str, Request] = {}
        self._readers: dict[str, _Reader] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._finished: list[Request] = []
        self._seeds = np.random.default_rng(config.seed)
        self._names = itertools.count()
        self.meter = Meter()
        self._last_read_s = 0.0

    # Sizes

    def _length_limit(self, model_limit: int | None) -> int:
        wanted = self.config.max_len
        if wanted is None:
            return model_limit or 8192
        if model_limit is not None and wanted > model_limit:
            raise ValueError(f"max_len is {wanted} tokens but the model's limit is {model_limit}; lower max_len")
        return wanted

    def _pages_spec(self, model: nnx.Module) -> PagesSpec:
        config = self.config
        platform = jax.default_backend()
        block_size = config.block_size or (CPU_BLOCK_SIZE if platform == "cpu" else ACCELERATOR_BLOCK_SIZE)
        dtype = config.kv_dtype or _floating_dtype(model)
        spec = PagesSpec.for_layers(cache_layers(model), num_blocks=2, block_size=block_size, dtype=dtype)
        if config.num_blocks is not None:
            return spec.with_blocks(config.num_blocks)
        if config.kv_memory is not None:
            num_blocks = spec.blocks_in(int(config.kv_memory), platform)
            if num_blocks < 2:
                raise ValueError(
                    f"kv_memory is {config.kv_memory} bytes but two blocks of {block_size} tokens need "
                    f"{2 * spec.physical_block_bytes(platform)}; raise kv_memory or lower block_size"
                )
        else:
            needed = 1 + config.max_rows * -(-self.max_len // block_size)
            num_blocks = max(2, min(needed, spec.blocks_in(DEFAULT_KV_BYTES, platform)))
        return spec.with_blocks(num_blocks)

    # Requests

    def add_request(
        self,
        request_id: str | None,
        prompt: str | AbstractSequence[int] | np.ndarray,
        params: SamplingParams | None = None,
        *,
        salt: str | None = None,
    ) -> str:
        """Queues a request.

        Args:
            request_id: its name; `None` chooses one.
            prompt: text or token ids.
            params: greedy, up to 128 tokens by default.
            salt: requests share cached KV only with requests of the same salt.

        Returns:
            The request's name.

        Raises:
            RequestError: the prompt is empty or too long, a token id is out of the vocabulary, the request could
                never fit into the pool or the rows, or the name is taken. Nothing is changed.
        """
        params = params or SamplingParams()
        name = f"request-{next(self._names)}" if request_id is None else request_id
        if name in self._readers or name in self._requests:
            raise RequestError(f"request {name!r} is there already; choose another name")
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer; give the engine one or use stop_token_ids")
        text, tokens = self._tokens_of(prompt)
        limit = self._check_size(tokens, params)
        seed = int(self._seeds.integers(MAX_SEED + 1)) if params.seed is None else params.seed
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos and self.tokenizer is not None:
            stop_ids |= frozenset(self.tokenizer.eos_ids)
        request = Request(name, text, tokens, params, seed, limit, stop_ids, salt)
        request.sequences = [Sequence(request, index) for index in range(params.n)]
        self._requests[name] = request
        if self.tokenizer is not None:
            self._readers[name] = _Reader(
                [self.tokenizer.detokenizer() for _ in request.sequences],
                [TextStream(params.stop) for _ in request.sequences],
            )
        self.scheduler.add(request)
        return name

    def _tokens_of(self, prompt: str | AbstractSequence[int] | np.ndarray) -> tuple[str | None, np.ndarray]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("the prompt is text but the engine has no tokenizer; give token ids")
            text, ids = prompt, self.tokenizer.encode(prompt)
        else:
            text, ids = None, prompt
        try:
            wide = np.asarray(ids if len(ids) else np.zeros(0, np.int64))
        except (TypeError, ValueError):
            raise RequestError("the prompt must be text or a flat list of token ids") from None
        if not wide.size:
            raise RequestError("the prompt is empty; give at least one token")
        if wide.ndim != 1 or not np.issubdtype(wide.dtype, np.integer):
            raise RequestError("the prompt must be text or a flat list of whole token ids")
        most = self.vocab_size if self.vocab_size is not None else np.iinfo(np.int32).max
        wrong = wide[(wide < 0) | (wide >= most)]
        if wrong.size:
            raise RequestError(f"token id {wrong[0]} is out of the vocabulary of {most} tokens")
        return text, wide.astype(np.int32)

    def _check_size(self, tokens: np.ndarray, params: SamplingParams) -> int:
        """Tokens that may be generated."""
        room = self.max_len - len(tokens)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens but max_len is {self.max_len}, one of them to be generated; "
                "shorten it or raise max_len"
            )
        if params.n > self.config.max_rows:
            raise RequestError(f"n is {params.n} but max_rows is {self.config.max_rows}; lower n or raise max_rows")
        if self.vocab_size is not None:
            outside = [token for token in params.stop_token_ids if token >= self.vocab_size]
            if outside:
                raise RequestError(f"stop token id {outside[0]} is out of the vocabulary of {self.vocab_size} tokens")
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        needed = -(-(len(tokens) + limit - 1) // self.manager.block_size)
        usable = self.manager.num_blocks - 1
        if needed > usable:
            raise RequestError(
                f"a prompt of {len(tokens)} tokens and {limit} more need {needed} blocks of {self.manager.block_size} "
                f"tokens but the pool has {usable}; lower max_tokens or give the pool more memory"
            )
        return limit

    def abort(self, request_id: str) -> None:
        """Ends a request at once; its blocks come back. A request that has ended or is unknown is left alone."""
        request = self._requests.get(request_id)
        if request is None:
            return
        for sequence in request.sequences:
            if sequence.status is not Status.FINISHED:
                self.scheduler.finish(sequence, "abort")
        self._retire(request)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or finished and not handed out yet."""
        return bool(self._requests or self._finished)

    # Steps

    def step(self) -> list[RequestOutput]:
        """Schedules and dispatches one step, then reads the step before it.

        Returns:
            The requests that have finished.
        """
        idle = not self._in_flight
        dispatched = self._dispatch()
        if idle and not dispatched and self.scheduler.has_work:
            raise RuntimeError("the scheduler has requests but can run none of them: this is a bug of pagedjax")
        while len(self._in_flight) > (1 if dispatched else 0):
            self._settle(self._in_flight.popleft())
        finished, self._finished = self._finished, []
        return [self.output_of(request) for request in finished]

    def _dispatch(self) -> bool:
        try:
            scheduled = self.scheduler.schedule(in_flight=bool(self._in_flight))
        except NeedSettleError:
            return False
        if scheduled is None:
            return False
        if self.runner.must_compile(scheduled):  # compiling is no part of a step's time
            for record in self._in_flight:
                jax.block_until_ready(record.output)
                record.ready_s = time.perf_counter()
            self.runner.compile_step(self.runner.bucket_of(scheduled))
        output, places = self.runner.dispatch(scheduled)
        step_id, now = self.manager.commit(), time.perf_counter()
        self._in_flight.append(_InFlight(step_id, scheduled.samples, places, output, bool(scheduled.prefills), now))
        self._meter_pool()
        return True

    def _settle(self, record: _InFlight) -> None:
        """Reads the tokens of a step and tells everyone."""
        drawn = np.asarray(record.output.token_ids)[record.places]
        self._meter_time(record)
        alive = [i for i, sequence in enumerate(record.samples) if sequence.status is Status.DECODING]
        sequences = [record.samples[i] for i in alive]
        ids = drawn[alive]
        self.manager.settle(record.step_id, rows_of(sequences), ids)
        for sequence, token in zip(sequences, ids.tolist(), strict=True):
            self._receive(sequence, token)

    def _receive(self, sequence: Sequence, token: int) -> None:
        request = sequence.request
        sequence.token_ids.append(token)
        if request.first_token_s is None:
            request.first_token_s = time.monotonic()
        reason = None
        if token in request.stop_ids:
            reason = "stop"
        else:
            if self._read_text(sequence, token):
                reason = "stop"
            elif len(sequence.token_ids) >= request.max_new_tokens:
                reason = "length"
        if reason:
            self.scheduler.finish(sequence, reason)
            if request.is_finished:
                self._retire(request)

    def _read_text(self, sequence: Sequence, token: int) -> bool:
        reader = self._readers.get(sequence.request.request_id)
        if reader is None:
            return False
        return reader.streams[sequence.index].feed(reader.decoders[sequence.index].push(token))

    def _retire(self, request: Request) -> None:
        if self._requests.pop(request.request_id, None) is not None:
            self._finished.append(request)
            self.meter.num_finished += 1

    def forget_finished(self, request_ids: set[str]) -> None:
        """Drops the outputs of requests that nobody will ask for."""
        self._finished = [request for request in self._finished if request.request_id not in request_ids]
        for name in request_ids:
            self._readers.pop(name, None)

    def _meter_pool(self) -> None:
        meter, usage = self.meter, self.manager.usage()
        meter.peak_held_blocks = max(meter.peak_held_blocks, usage.num_held)
        meter.peak_shared_blocks = max(meter.peak_shared_blocks, usage.num_shared)
        meter.peak_rows = max(meter.peak_rows, len(self.scheduler.running))

    def _meter_time(self, record: _InFlight) -> None:
        now = record.ready_s or time.perf_counter()
        took = now - max(self._last_read_s, record.dispatched_s)
        self._last_read_s = now
        self.meter.num_generated_tokens += len(record.samples)
        if record.is_prefill:
            self.meter.prefill_s += took
        else:
            self.meter.decode_s += took
            self.meter.num_decode_step_tokens += len(record.samples)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached KV that no request is using.

        Raises:
            RuntimeError: a request is running.
        """
        while self._in_flight:
            self._settle(self._in_flight.popleft())
        if not self.manager.reset():
            raise RuntimeError("requests are running; finish or abort them before the prefix cache is reset")

    # Outputs

    def output_of(self, request: Request | str) -> RequestOutput:
        """The output of a request as far as it is known.

        Raises:
            KeyError: there is no unfinished request of that name.
        """
        if isinstance(request, str):
            request = self._requests[request]
        reader = self._readers.get(request.request_id)
        completions = []
        for sequence in request.sequences:
            text = ""
            if reader is not None:
                stream = reader.streams[sequence.index]
                if sequence.status is Status.FINISHED:
                    if sequence.finish_reason != "stop":
                        stream.feed(reader.decoders[sequence.index].flush())
                    text = stream.finish()
                else:
                    text = stream.visible
            completions.append(Completion(sequence.index, list(sequence.token_ids), text, sequence.finish_reason))
        if request.is_finished:
            self._readers.pop(request.request_id, None)
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids.tolist(),
            completions=completions,
            num_cached_tokens=request.num_cached_tokens or 0,
            finished=request.is_finished,
            error=request.error,
        )

    def stats(self) -> EngineStats:
        """Counters since the engine started, and the state of the pool now."""
        return EngineStats.collect(self)


def _floating_dtype(model: nnx.Module) -> np.dtype:
    """The dtype of most of the model's weights."""
    sizes: dict[np.dtype, int] = {}
    for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)):
        if np.issubdtype(leaf.dtype, np.floating) or leaf.dtype == jax.numpy.bfloat16:
            sizes[leaf.dtype] = sizes.get(leaf.dtype, 0) + leaf.size
    if not sizes:
        raise ValueError("the model has no floating-point parameters; set kv_dtype in the configuration")
    return np.dtype(max(sizes, key=lambda dtype: sizes[dtype]))
