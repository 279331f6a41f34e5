"""The engine: scheduler, compiled steps, sampling, and the interfaces that people call."""

from pagedjax.engine.config import EngineConfig
from pagedjax.engine.engine import Engine, RequestError
from pagedjax.engine.llm import LLM
from pagedjax.engine.request import Completion, RequestOutput
from pagedjax.engine.sampling_params import SamplingParams
from pagedjax.engine.stats import EngineStats

__all__ = [
    "LLM",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
]
