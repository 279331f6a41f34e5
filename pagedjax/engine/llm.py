"""The offline interface: prompts in, completions out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from flax import nnx

from pagedjax.engine import compile_cache
from pagedjax.engine.config import EngineConfig
from pagedjax.engine.engine import Engine
from pagedjax.engine.request import RequestOutput
from pagedjax.engine.sampling_params import SamplingParams
from pagedjax.engine.stats import EngineStats

Prompt = str | Sequence[int] | np.ndarray
Message = dict[str, str]


class LLM:
    """A model with its tokenizer, ready to generate through a paged cache.

    Args:
        model: ``"smollm2-135m"``, a Hugging Face folder, a GGUF file, or an NNX model.
        tokenizer: for an NNX model; the others bring their own.
        config: sizes of the engine.
        dtype: dtype of the weights, for models that are loaded.
        max_len: the model's limit of tokens, for an NNX model.

    Raises:
        LoadError: the model cannot be loaded.
        ValueError: the configuration does not fit the model.
    """

    def __init__(
        self,
        model: str | nnx.Module,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        *,
        dtype: Any = "float32",
        max_len: int | None = None,
    ):
        config = config or EngineConfig()
        compile_cache.enable(config.compilation_cache)  # before anything that takes time
        vocab_size = None
        if not isinstance(model, nnx.Module):
            from pagedjax.models import load_model

            loaded = load_model(model, dtype=dtype)
            model, tokenizer = loaded.model, loaded.tokenizer
            max_len, vocab_size = loaded.config.max_position_embeddings, loaded.config.vocab_size
        self.tokenizer = tokenizer
        self.engine = Engine(model, tokenizer, config, max_len=max_len, vocab_size=vocab_size)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts, many at a time.

        Args:
            prompts: one prompt or several; each is text or token ids.
            params: for all prompts, or one for each.

        Returns:
            One output a prompt, in their order.

        Raises:
            RequestError: a prompt cannot be served; then none of them is.
        """
        names = self._add(prompts, params)
        done: dict[str, RequestOutput] = {}
        try:
            while len(done) < len(names):
                done.update((output.request_id, output) for output in self.engine.step())
        finally:
            self._abort(set(names) - set(done))
        return [done[name] for name in names]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[list[RequestOutput]]:
        """Completes prompts and yields all outputs, in their order, after every step.

        Closing the iterator aborts what is unfinished.
        """
        names = self._add(prompts, params)
        done: dict[str, RequestOutput] = {}
        try:
            while len(done) < len(names):
                done.update((output.request_id, output) for output in self.engine.step())
                yield [done[name] if name in done else self.engine.output_of(name) for name in names]
        finally:
            self._abort(set(names) - set(done))

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers conversations, each a list of ``{"role", "content"}``, through the model's chat template."""
        several = [conversations] if conversations and isinstance(conversations[0], dict) else conversations
        return self.generate([self.chat_prompt(messages) for messages in several], params)  # type: ignore[arg-type]

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the answer begins."""
        if self.tokenizer is None:
            raise ValueError("chat needs a tokenizer with a chat template; give one with the model")
        return list(self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True))

    def stats(self) -> EngineStats:
        """Counters of the engine since it started."""
        return self.engine.stats()

    def _add(self, prompts: Any, params: Any) -> list[str]:
        several = prompts if _is_several(prompts) else [prompts]
        each = list(params) if isinstance(params, list | tuple) else [params] * len(several)
        if len(each) != len(several):
            raise ValueError(f"{len(several)} prompts but {len(each)} SamplingParams; give one for all or one for each")
        names: list[str] = []
        try:
            for prompt, wanted in zip(several, each, strict=True):
                names.append(self.engine.add_request(None, prompt, wanted))
        except BaseException:
            self._abort(set(names))
            raise
        return names

    def _abort(self, names: set[str]) -> None:
        for name in names:
            self.engine.abort(name)
        if names:
            self.engine.forget_finished(names)


def _is_several(prompts: Any) -> bool:
    if isinstance(prompts, str | np.ndarray):
        return False
    return not prompts or not isinstance(prompts[0], int | np.integer)
