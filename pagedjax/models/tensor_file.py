"""What the loaders ask of a file of weights: names, shapes, and rows of a tensor read one slice at a time.

Rows are read with ``os.preadv`` into memory that is dropped again, never through a memory map: mapped pages would
count as resident, and a bfloat16 model read from a float32 file would take three times its size.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from pagedjax.models.errors import LoadError

__all__ = ["TensorFile", "TensorInfo", "read_exactly"]


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file.

    Attributes:
        shape: as NumPy counts, the output axis of a matrix first: ``[out, in]``.
        kind: the number format in the file's own words (``Q4_1``, ``BF16``).
        offset_bytes: where it begins, from the start of the file.
        num_bytes: its size in the file.
        file: the file it lies in.
    """

    shape: tuple[int, ...]
    kind: str
    offset_bytes: int
    num_bytes: int
    file: Path


class TensorFile(Protocol):
    """A GGUF file, or the safetensors files of a folder."""

    path: Path
    tensors: Mapping[str, TensorInfo]

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows ``start:stop`` of a tensor (of a vector: numbers), in a float format that NumPy can cast."""
        ...

    def close(self) -> None:
        """Closes the files; reading is over."""
        ...


def read_exactly(descriptor: int, num_bytes: int, offset_bytes: int, path: Path) -> np.ndarray:
    """Reads bytes of a file at an offset, as ``uint8 [num_bytes]``; safe to call from several threads.

    Raises:
        LoadError: the file ends before.
    """
    buffer = np.empty(num_bytes, np.uint8)
    view = memoryview(buffer)
    done = 0
    while done < num_bytes:
        count = os.preadv(descriptor, [view[done:]], offset_bytes + done)
        if count == 0:
            raise LoadError(f"{path}: ends {num_bytes - done:,} bytes too early; it is truncated, fetch it again")
        done += count
    return buffer
