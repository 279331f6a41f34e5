"""Reads GGUF files (versions 2 and 3): metadata, the list of tensors, and dequantised rows.

The ``gguf`` package does the dequantising; its reader is not used because it makes two NumPy arrays for every string
of the vocabulary (measured: 5.4 s for the demo model's header, against 0.1 s here). Format: docs/gguf.md of the ggml
repository.
"""

import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pagedjax.models.errors import LoadError
from pagedjax.models.tensor_file import TensorInfo, read_exactly

__all__ = ["GGUFFile"]

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
# Numbers dequantised at a time: the demo model loads in 0.86 s with this, in 1.6 s with a quarter (calls) and with
# 16 times as many (caches)
_GROUP_SIZE = 65536


class GGUFFile:
    """A GGUF file, opened.

    Attributes:
        path: the file.
        metadata: key to value: numbers, strings, booleans; arrays as lists of strings or NumPy arrays.
        tensors: name to `TensorInfo`, with shapes as NumPy counts (the file has them reversed).

    Raises:
        LoadError: no such file, no GGUF, a version or byte order that is not supported, or a truncated file.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            raise LoadError(f"{self.path}: no such file") from None
        except OSError as error:
            raise LoadError(f"{self.path}: cannot be opened ({error.strerror})") from error
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows ``start:stop`` of a tensor, dequantised to float32 (F16 and BF16 too).

        Raises:
            LoadError: a format that the ``gguf`` package does not dequantise, or a truncated file.
        """
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        info = self.tensors[name]
        row_bytes = info.num_bytes // info.shape[0]
        data = read_exactly(
            self._descriptor, (stop - start) * row_bytes, info.offset_bytes + start * row_bytes, self.path
        )
        row_shape = info.shape[1:]
        row_size = int(np.prod(row_shape, dtype=np.int64))
        step = max(1, _GROUP_SIZE // row_size) * row_bytes
        kind = GGMLQuantizationType[info.kind]
        numbers = np.empty((stop - start) * row_size, np.float32)
        done = 0
        try:
            for offset in range(0, len(data), step):
                group = dequantize(data[None, offset : offset + step], kind).ravel()
                numbers[done : done + group.size] = group
                done += group.size
        except NotImplementedError as error:
            raise LoadError(
                f"{self.path}: tensor {name} is {info.kind}, which the gguf package cannot dequantise"
            ) from error
        return numbers.reshape(stop - start, *row_shape)

    def _read_header(self) -> None:
        file_bytes = os.fstat(self._descriptor).st_size
        if file_bytes < 24:
            raise LoadError(f"{self.path}: has {file_bytes} bytes, which is no GGUF file; fetch it again")
        with mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != _MAGIC:
                raise LoadError(f"{self.path}: begins with {data[:4]!r}, not {_MAGIC!r}: it is no GGUF file")
            version = struct.unpack_from("<I", data, 4)[0]
            if version not in (2, 3):
                raise LoadError(
                    f"{self.path}: GGUF version {version} is not supported; supported: 2, 3 (little-endian)"
                )
            cursor = _Cursor(data, 8)
            try:
                num_tensors, num_keys = cursor.unpack("QQ")
                self.metadata: Mapping[str, Any] = MappingProxyType(
                    {cursor.string(): cursor.value(cursor.one("I")) for _ in range(num_keys)}
                )
                infos = [self._tensor(cursor) for _ in range(num_tensors)]
            except (struct.error, IndexError, UnicodeDecodeError, MemoryError) as error:
                raise LoadError(
                    f"{self.path}: the header breaks off or is damaged at byte {cursor.offset:,} of {file_bytes:,};"
                    " the file is truncated or corrupt, fetch it again"
                ) from error
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(self._place(infos, cursor.offset, file_bytes))

    def _tensor(self, cursor: "_Cursor") -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.string()
        num_dims = cursor.one("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise IndexError(f"{num_dims} dimensions")
        dims = cursor.unpack("Q" * num_dims)
        kind, offset = cursor.unpack("IQ")
        return name, tuple(reversed(dims)), kind, offset

    def _place(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], header_bytes: int, file_bytes: int
    ) -> dict[str, TensorInfo]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise LoadError(f"{self.path}: general.alignment is {alignment!r} but must be a positive number")
        data_start = -(-header_bytes // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind_id, offset in infos:
            try:
                kind = GGMLQuantizationType(kind_id)
            except ValueError:
                raise LoadError(f"{self.path}: tensor {name} has the unknown format {kind_id}; update gguf") from None
            block_size, block_bytes = GGML_QUANT_SIZES[kind]
            if min(shape) < 1 or shape[-1] % block_size:
                raise LoadError(
                    f"{self.path}: tensor {name} has shape {list(shape)}, which {kind.name} cannot have; fetch it again"
                )
            num_numbers = 1
            for size in shape:
                num_numbers *= size
            info = TensorInfo(shape, kind.name, data_start + offset, num_numbers // block_size * block_bytes, self.path)
            if info.offset_bytes + info.num_bytes > file_bytes:
                raise LoadError(
                    f"{self.path}: truncated: tensor {name} ends at byte {info.offset_bytes + info.num_bytes:,} but"
                    f" the file has {file_bytes:,}; fetch it again"
                )
            if name in tensors:
                raise LoadError(f"{self.path}: holds two tensors named {name}; fetch it again")
            tensors[name] = info
        return tensors


class _Cursor:
    """Reads one little-endian value after another; struct.error or IndexError where the data ends."""

    def __init__(self, data: mmap.mmap, offset: int):
        self.data = data
        self.offset = offset

    def unpack(self, layout: str) -> tuple[Any, ...]:
        layout = "<" + layout
        values = struct.unpack_from(layout, self.data, self.offset)
        self.offset += struct.calcsize(layout)
        return values

    def one(self, layout: str) -> Any:
        return self.unpack(layout)[0]

    def take(self, num_bytes: int) -> bytes:
        end = self.offset + num_bytes
        if end > len(self.data):
            raise IndexError(f"{num_bytes} bytes asked for past the end")
        piece = self.data[self.offset : end]
        self.offset = end
        return piece

    def string(self) -> str:
        return self.take(self.one("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.one(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise IndexError(f"value of unknown type {kind}")
        item_kind, count = self.unpack("IQ")
        if item_kind == _STRING:
            return self.strings(count)
        if item_kind in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[item_kind])
            return np.frombuffer(self.take(count * dtype.itemsize), dtype)
        return [self.value(item_kind) for _ in range(count)]

    def strings(self, count: int) -> list[str]:
        """As `string`, in a loop without a call for each: a vocabulary has 100,000 of them."""
        data, offset, end, unpack = self.data, self.offset, len(self.data), struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            (size,) = unpack(data, offset)
            if offset + 8 + size > end:
                raise IndexError("a string ends past the end of the file")
            found.append(data[offset + 8 : offset + 8 + size].decode("utf-8"))
            offset += 8 + size
        self.offset = offset
        return found
