"""A paged KV cache for JAX: block allocator, prefix caching, copy-on-write and continuous batching for Flax models.

Importing this package is cheap: names are resolved on first use (PEP 562), so that
``pagedjax.cache`` (plain Python and NumPy) and ``pagedjax --help`` never import jax.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

try:
    __version__ = version("pagedjax")
except PackageNotFoundError:  # a source tree on PYTHONPATH that was never installed
    __version__ = "0+unknown"

_SUBMODULES = ("bench", "cache", "engine", "kernels", "models", "nnx", "paged")
_NAMES = {  # public name -> module that defines it
    "LLM": "pagedjax.engine",
    "Completion": "pagedjax.engine",
    "Engine": "pagedjax.engine",
    "EngineConfig": "pagedjax.engine",
    "EngineStats": "pagedjax.engine",
    "RequestError": "pagedjax.engine",
    "RequestOutput": "pagedjax.engine",
    "SamplingParams": "pagedjax.engine",
    "load_model": "pagedjax.models",
}

if TYPE_CHECKING:
    from pagedjax import bench, cache, engine, kernels, models, nnx, paged
    from pagedjax.engine import (
        LLM,
        Completion,
        Engine,
        EngineConfig,
        EngineStats,
        RequestError,
        RequestOutput,
        SamplingParams,
    )
    from pagedjax.models import load_model

__all__ = [
    "LLM",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "bench",
    "cache",
    "engine",
    "kernels",
    "load_model",
    "models",
    "nnx",
    "paged",
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"pagedjax.{name}")
    if name in _NAMES:
        return getattr(import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'pagedjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
