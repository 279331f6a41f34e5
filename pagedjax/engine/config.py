"""The configuration of an engine: what a user may set, checked before anything is allocated."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

CPU_BLOCK_SIZE = 32
ACCELERATOR_BLOCK_SIZE = 64
DEFAULT_KV_BYTES = 1 << 30

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(text: str | int) -> int:
    """Bytes of a size such as ``"512MiB"``, ``"2GB"`` or ``1073741824``; every unit is a power of 1024.

    >>> parse_bytes("512MiB"), parse_bytes("1.5g"), parse_bytes(4096)
    (536870912, 1610612736, 4096)
    """
    if isinstance(text, int) and not isinstance(text, bool):
        number = text
    else:
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", str(text), re.IGNORECASE)
        if not found:
            raise ValueError(f"kv_memory is {text!r} but must be a size such as 512MiB or 2GiB")
        number = int(float(found[1]) * _UNITS[found[2].lower()])
    if number < 1:
        raise ValueError(f"kv_memory is {text!r} but must be above 0 bytes")
    return number


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine lays out its cache and its steps.

    Attributes:
        block_size: tokens in a block; `None`: 32 on CPU, 64 elsewhere.
        num_blocks: blocks of the pool, the null block included; `None`: what `kv_memory` holds.
        kv_memory: bytes of the pages, or a size such as ``"2GiB"``; `None`: 1 GiB, or less where all rows at
            their full length need less.
        max_rows: sequences that run at the same time.
        max_len: tokens of a sequence at most, prompt and completion; `None`: the model's limit.
        max_prefill_tokens: prefill tokens in a step; longer prompts are computed in chunks.
        kv_dtype: dtype of the pages; `None`: the model's.
        enable_prefix_caching: reuse the KV of prompts that start alike.
        min_partial_hit: tokens of an unfinished block that are worth a copy.
        seed: source of the seeds of requests that have none; `None` draws them from the system.
        compilation_cache: folder of compiled programs; `None`: the user's cache folder, ``""``: none.
    """

    block_size: int | None = None
    num_blocks: int | None = None
    kv_memory: str | int | None = None
    max_rows: int = 32
    max_len: int | None = None
    max_prefill_tokens: int = 512
    kv_dtype: Any = None
    enable_prefix_caching: bool = True
    min_partial_hit: int = 1
    seed: int | None = None
    compilation_cache: str | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("block_size", 1),
            ("num_blocks", 2),
            ("max_rows", 1),
            ("max_len", 2),
            ("max_prefill_tokens", 1),
            ("min_partial_hit", 1),
        ):
            value = getattr(self, name)
            if value is None and name in ("block_size", "num_blocks", "max_len"):
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise ValueError(f"{name} is {value!r} but must be a whole number")
            if value < least:
                reason = ": block 0 is the null block, so one more is the least" if name == "num_blocks" else ""
                raise ValueError(f"{name} is {value} but must be at least {least}{reason}")
        if self.num_blocks is not None and self.kv_memory is not None:
            raise ValueError("num_blocks and kv_memory are both given; give one of them")
        if self.kv_memory is not None:
            object.__setattr__(self, "kv_memory", parse_bytes(self.kv_memory))
        if self.kv_dtype is not None:
            dtype = np.dtype(self.kv_dtype)
            if not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(f"kv_dtype is {dtype} but must be a floating-point dtype")
            object.__setattr__(self, "kv_dtype", dtype)
