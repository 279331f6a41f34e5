"""Reads safetensors files: one ``model.safetensors``, or the shards that ``model.safetensors.index.json`` lists.

The format is a length, a JSON header and raw numbers, so that rows can be read straight from their place in the file
(https://huggingface.co/docs/safetensors). The ``safetensors`` package maps whole files into memory, see `tensor_file`.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from pagedjax.models.config import read_json
from pagedjax.models.errors import LoadError
from pagedjax.models.tensor_file import TensorInfo, read_exactly

__all__ = ["SafetensorsFile"]

_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class SafetensorsFile:
    """The safetensors weights of a Hugging Face folder, opened.

    Attributes:
        path: the file, or the index of the shards.
        tensors: name to `TensorInfo`.

    Raises:
        LoadError: no such file, a shard that is missing, a damaged header, or a truncated file.
    """

    def __init__(self, folder: Path | str):
        folder = Path(folder)
        single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        self.path = index if index.is_file() and not single.is_file() else single
        self._descriptors: dict[Path, int] = {}
        tensors: dict[str, TensorInfo] = {}
        try:
            for file in self._files(folder):
                for name, info in self._open(file).items():
                    if name in tensors:
                        raise LoadError(f"{file}: tensor {name} is in {tensors[name].file} too; keep one of them")
                    tensors[name] = info
        except BaseException:
            self.close()
            raise
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)

    def close(self) -> None:
        """Closes all files."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows ``start:stop`` of a tensor in the format of the file.

        Raises:
            LoadError: numbers that are no floats of 16, 32 or 64 bits, or a truncated file.
        """
        info = self.tensors[name]
        if info.kind not in _DTYPES:
            raise LoadError(f"{info.file}: tensor {name} is {info.kind}; supported: {', '.join(_DTYPES)}")
        row_bytes = info.num_bytes // info.shape[0]
        descriptor = self._descriptors[info.file]
        data = read_exactly(descriptor, (stop - start) * row_bytes, info.offset_bytes + start * row_bytes, info.file)
        return data.view(_DTYPES[info.kind]).reshape(stop - start, *info.shape[1:])

    def _files(self, folder: Path) -> list[Path]:
        if self.path.name == "model.safetensors":
            return [self.path]
        weight_map = read_json(self.path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise LoadError(f"{self.path}: weight_map is missing or damaged; fetch the file again")
        names = sorted(set(weight_map.values()))
        if any(Path(name).name != name for name in names):
            raise LoadError(f"{self.path}: a shard lies outside the folder ({', '.join(names)}); fetch the file again")
        return [folder / name for name in names]

    def _open(self, file: Path) -> dict[str, TensorInfo]:
        try:
            descriptor = os.open(file, os.O_RDONLY)
        except FileNotFoundError:
            raise LoadError(f"{file}: no such file; a Hugging Face folder needs it") from None
        except OSError as error:
            raise LoadError(f"{file}: cannot be opened ({error.strerror})") from error
        self._descriptors[file] = descriptor
        file_bytes = os.fstat(descriptor).st_size
        header_bytes = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if file_bytes < 8 or header_bytes > min(_MAX_HEADER_BYTES, file_bytes - 8):
            raise LoadError(f"{file}: no safetensors file, or truncated ({file_bytes:,} bytes); fetch it again")
        try:
            header = json.loads(read_exactly(descriptor, header_bytes, 8, file).tobytes())
            entries = {name: self._entry(entry) for name, entry in header.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LoadError(f"{file}: the safetensors header is damaged ({error}); fetch it again") from error
        data_start = 8 + header_bytes
        tensors = {}
        for name, (kind, shape, start, stop) in entries.items():
            if data_start + stop > file_bytes:
                raise LoadError(
                    f"{file}: truncated: tensor {name} ends at byte {data_start + stop:,} but the file has"
                    f" {file_bytes:,}; fetch it again"
                )
            tensors[name] = TensorInfo(shape, kind, data_start + start, stop - start, file)
        return tensors

    @staticmethod
    def _entry(entry: dict[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
        kind, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
        start, stop = (int(offset) for offset in entry["data_offsets"])
        if not 0 <= start <= stop:
            raise ValueError(f"offsets {start}, {stop}")
        if kind in _DTYPES and math.prod(shape) * _DTYPES[kind].itemsize != stop - start:
            raise ValueError(f"shape {list(shape)} of {kind} does not take {stop - start} bytes")
        return kind, shape, start, stop
