"""Decoders in Flax NNX, and what loads their weights and tokenizers.

Names are resolved on first use: reading a config or a tokenizer does not import jax.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedjax.models.chat import ChatTemplate, ChatTemplateError
    from pagedjax.models.config import ModelConfig, config_from_gguf, config_from_hf
    from pagedjax.models.detokenizer import Detokenizer
    from pagedjax.models.errors import LoadError
    from pagedjax.models.llama import Llama
    from pagedjax.models.load import DEMO_MODEL, Loaded, find_demo_model, load_model
    from pagedjax.models.tokenizer import Tokenizer, tokenizer_from_gguf, tokenizer_from_hf

_MODULES = {
    "chat": ("ChatTemplate", "ChatTemplateError"),
    "config": ("ModelConfig", "config_from_gguf", "config_from_hf"),
    "detokenizer": ("Detokenizer",),
    "errors": ("LoadError",),
    "llama": ("Llama",),
    "load": ("DEMO_MODEL", "Loaded", "find_demo_model", "load_model"),
    "tokenizer": ("Tokenizer", "tokenizer_from_gguf", "tokenizer_from_hf"),
}
_NAMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "DEMO_MODEL",
    "ChatTemplate",
    "ChatTemplateError",
    "Detokenizer",
    "Llama",
    "LoadError",
    "Loaded",
    "ModelConfig",
    "Tokenizer",
    "config_from_gguf",
    "config_from_hf",
    "find_demo_model",
    "load_model",
    "tokenizer_from_gguf",
    "tokenizer_from_hf",
]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(import_module(f"pagedjax.models.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'pagedjax.models' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
