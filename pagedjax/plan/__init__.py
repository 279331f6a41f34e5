"""Planning for machines that are not here: what they are, and how to compile for them.

Nothing here needs the machine that is planned for, and nothing imports jax before it is used.
"""

from pagedjax.plan.targets import (
    TARGETS,
    CompilerNotInstalledError,
    GpuTarget,
    Target,
    TpuTarget,
    mesh_for,
    missing_compiler,
    target_named,
)

__all__ = [
    "TARGETS",
    "CompilerNotInstalledError",
    "GpuTarget",
    "Target",
    "TpuTarget",
    "mesh_for",
    "missing_compiler",
    "target_named",
]
