"""What a figure was measured on and with, so that a record can be read years later.

Importing this module imports no jax; `machine` tells of jax's devices only where jax is loaded already.
"""

import functools
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "pagedjax")


def machine() -> dict[str, str | int | None]:
    """Return what this runs on: processor, cores that this process may use, memory, and the jax backend if loaded."""
    found: dict[str, str | int | None] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if "jax" in sys.modules:
        devices = sys.modules["jax"].devices()
        found |= {
            "backend": devices[0].platform,
            "device_kind": devices[0].device_kind,
            "num_devices": len(devices),
        }
    return found


def versions() -> dict[str, str | int | None]:
    """Return the versions of Python and of the packages that matter, and pagedjax's git commit if it is a checkout.

    A commit ends in ``+`` when tracked files differ from it.
    """
    found: dict[str, str | int | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found | {"commit": _commit()}


@functools.cache
def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


@functools.cache
def _commit() -> str | None:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # installed, perhaps below another project's checkout
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
