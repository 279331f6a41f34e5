"""The persistent compilation cache: what was compiled once is loaded from disk by the next process."""

from __future__ import annotations

import os
from pathlib import Path

import jax


class CacheFolderError(ValueError):
    """The folder of the compilation cache cannot be used."""


def default_folder() -> Path:
    """``$PAGEDJAX_CACHE``, or ``pagedjax`` in the user's cache folder (``$XDG_CACHE_HOME``, ``~/.cache``)."""
    chosen = os.environ.get("PAGEDJAX_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pagedjax"


def enable(folder: str | None = None) -> Path | None:
    """Turns the persistent cache on for this process, unless the user has chosen one through jax already.

    Args:
        folder: where to keep programs; `None` is `default_folder()`, ``""`` leaves the cache alone.

    Returns:
        The folder in use, or `None`.

    Raises:
        CacheFolderError: the folder cannot be made or written to.
    """
    if folder == "":
        return None
    if folder is None and jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    path = Path(folder).expanduser() if folder else default_folder()
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK)
    except OSError as error:
        raise CacheFolderError(_message(path, error.strerror or str(error))) from None
    if not writable:
        raise CacheFolderError(_message(path, "it cannot be written to"))
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return path


def _message(path: Path, reason: str) -> str:
    return (
        f"the compilation cache folder {path} cannot be used ({reason}); set PAGEDJAX_CACHE to another folder, or pass "
        'compilation_cache="" to do without'
    )
