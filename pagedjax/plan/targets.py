"""The accelerators that pagedjax is compiled for, and meshes of them on a machine that has none.

A target is a table row: the memory, bandwidth and peak of one device, as JAX counts devices. `mesh_for` turns a
target into a mesh of devices that exist only for the compiler; what is lowered with shardings on that mesh goes
through the real compilers (Mosaic and XLA for TPU, Mosaic GPU, XLA and ptxas for NVIDIA), so that
`compiled.memory_analysis()` says what would happen over there. Nothing can be run on such a mesh.

The compilers are Python packages, without driver or device: `libtpu`; `jax-cuda13-plugin`, `jax-cuda13-pjrt` (of jax's
own version) and `nvidia-cuda-nvcc`. The dependency group `aot` of this project holds them all.

    mesh = mesh_for("tpu-v6e", chips=8)
    spec = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P("x")))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):    # so that Pallas knows which chip it compiles for
        compiled = jax.jit(f).lower(spec).compile()
    compiled.memory_analysis().temp_size_in_bytes               # bytes per device

Figures are those of public data sheets (Google's pages on TPU system architecture; NVIDIA's data sheets of the SXM and
HGX parts, dense rates). They are leads, not readings: nobody reaches them in full.
"""

import glob
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import jax

_GIB = 1 << 30
_MIB = 1 << 20
_KIB = 1 << 10


class CompilerNotInstalledError(ImportError):
    """The compiler of a target is not importable; the message names what to install."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One device of a kind of accelerator, as JAX counts devices.

    Attributes:
      name: what it is called here, on the command line and in records, such as ``tpu-v6e``.
      device_kind: what JAX calls it.
      hbm_bytes: device memory, bytes. What a program can use is less: the runtime keeps some.
      hbm_bytes_per_s: device memory bandwidth, bytes/s.
      peak_flops: dense matrix peak, operations/s (a multiply-add counts two), by the dtype of the operands.
    """

    name: str
    device_kind: str
    hbm_bytes: int
    hbm_bytes_per_s: float
    peak_flops: Mapping[str, float]

    @property
    def platform(self) -> Literal["tpu", "cuda"]:
        """The JAX platform of the device."""
        raise NotImplementedError

    @property
    def compiler_modules(self) -> tuple[str, ...]:
        """The Python modules that must be importable to compile for it."""
        raise NotImplementedError

    @property
    def extra(self) -> str:
        """The extra of the pagedjax package that brings its compiler (and its runtime)."""
        raise NotImplementedError

    def devices(self, chips: int) -> "list[jax.Device]":
        """At least `chips` devices of this kind, for the compiler only."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TpuTarget(Target):
    """A TPU. A v4 or v5p chip is one device of two cores (megacore); a v7x chip is two devices.

    Attributes:
      topology: the prefix that libtpu knows the generation by.
      shapes: topologies, in chips along each axis of the torus, smallest first.
      devices_per_chip: how many devices JAX makes of one chip.
      num_cores: TensorCores of one device.
      vmem_bytes: vector memory of one core, bytes.
      topology_options: what else libtpu is told.
    """

    topology: str
    shapes: tuple[tuple[int, ...], ...]
    devices_per_chip: int = 1
    num_cores: int = 1
    vmem_bytes: int
    topology_options: Mapping[str, str] = field(default_factory=dict)

    @property
    def platform(self) -> Literal["tpu"]:
        return "tpu"

    @property
    def compiler_modules(self) -> tuple[str, ...]:
        return ("libtpu",)

    @property
    def extra(self) -> str:
        return "tpu"

    def devices(self, chips: int) -> "list[jax.Device]":
        from jax.experimental import topologies

        _quieten_libtpu()
        for shape in self.shapes:
            if prod(shape) * self.devices_per_chip >= chips:
                name = f"{self.topology}:{'x'.join(map(str, shape))}"
                return list(topologies.get_topology_desc(name, platform="tpu", **self.topology_options).devices)
        largest = prod(self.shapes[-1]) * self.devices_per_chip
        raise ValueError(f"chips is {chips} but the largest slice of {self.name} known has {largest}; ask for fewer")


@dataclass(frozen=True, kw_only=True)
class GpuTarget(Target):
    """An NVIDIA GPU; hosts have eight of them.

    Attributes:
      compute_capability: major and minor.
      num_sms: streaming multiprocessors.
      smem_bytes: shared memory of one multiprocessor, bytes.
      l2_bytes: second-level cache, bytes.
      clock_hz: boost clock of the multiprocessors.
    """

    compute_capability: tuple[int, int]
    num_sms: int
    smem_bytes: int
    l2_bytes: int
    clock_hz: float

    @property
    def platform(self) -> Literal["cuda"]:
        return "cuda"

    @property
    def compiler_modules(self) -> tuple[str, ...]:
        return ("jax_cuda13_plugin", "jax_plugins.xla_cuda13", "nvidia.cu13")

    @property
    def extra(self) -> str:
        return "cuda13"

    @property
    def smem_block_bytes(self) -> int:
        """Shared memory that one thread block can opt in to, bytes: all but the 1 KiB that the system keeps."""
        return self.smem_bytes - _KIB

    def devices(self, chips: int) -> "list[jax.Device]":
        from jax.experimental import topologies

        shape = f"1x1x{chips}" if chips <= 8 else f"1x{-(-chips // 8)}x8"  # slices x hosts x devices of a host
        config = self._target_config()
        described = topologies.get_topology_desc(self.name, platform="cuda", topology=shape, target_config=config)
        return list(described.devices)

    def _target_config(self) -> str:
        """XLA's GpuTargetConfig, in protobuf text format: what it would ask of the driver."""
        major, minor = self.compute_capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: {48 * _KIB} shared_memory_per_core: {self.smem_bytes}
  shared_memory_per_block_optin: {self.smem_block_bytes}
  threads_per_core_limit: 2048 core_count: {self.num_sms} fpus_per_core: 128
  block_dim_limit_x: {2**31 - 1} block_dim_limit_y: {2**16 - 1} block_dim_limit_z: {2**16 - 1}
  memory_bandwidth: {int(self.hbm_bytes_per_s)} l2_cache_size: {self.l2_bytes} clock_rate_ghz: {self.clock_hz / 1e9}
  device_memory_size: {self.hbm_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{self.device_kind}"
"""


_PLANE = ((2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_CUBE = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8))

TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        TpuTarget(
            name="tpu-v4",
            device_kind="TPU v4",
            hbm_bytes=32 * _GIB,
            hbm_bytes_per_s=1228e9,
            peak_flops={"bfloat16": 275e12, "int8": 275e12},
            topology="v4",
            shapes=_CUBE,
            num_cores=2,
            vmem_bytes=16 * _MIB,
            # A v4 machine makes one device of a chip's two cores; libtpu's own default for topologies makes two.
            topology_options={"chip_config_name": "megacore"},
        ),
        TpuTarget(
            name="tpu-v5e",
            device_kind="TPU v5 lite",
            hbm_bytes=16 * _GIB,
            hbm_bytes_per_s=819e9,
            peak_flops={"bfloat16": 197e12, "int8": 394e12},
            topology="v5e",
            shapes=_PLANE,
            vmem_bytes=128 * _MIB,
        ),
        TpuTarget(
            name="tpu-v5p",
            device_kind="TPU v5",
            hbm_bytes=95 * _GIB,
            hbm_bytes_per_s=2765e9,
            peak_flops={"bfloat16": 459e12, "int8": 918e12},
            topology="v5p",
            shapes=_CUBE,
            num_cores=2,
            vmem_bytes=64 * _MIB,
        ),
        TpuTarget(
            name="tpu-v6e",
            device_kind="TPU v6 lite",
            hbm_bytes=32 * _GIB,
            hbm_bytes_per_s=1640e9,
            peak_flops={"bfloat16": 918e12, "int8": 1836e12, "float8_e4m3fn": 918e12},
            topology="v6e",
            shapes=_PLANE,
            vmem_bytes=128 * _MIB,
        ),
        TpuTarget(
            name="tpu-v7x",
            device_kind="TPU7x",
            hbm_bytes=96 * _GIB,
            hbm_bytes_per_s=7380e9 / 2,
            peak_flops={"bfloat16": 2307e12 / 2, "float8_e4m3fn": 4614e12 / 2},
            topology="tpu7x",
            shapes=_CUBE,
            devices_per_chip=2,
            vmem_bytes=64 * _MIB,
        ),
        GpuTarget(
            name="gpu-a100",
            device_kind="NVIDIA A100-SXM4-80GB",
            hbm_bytes=80 * 10**9,
            hbm_bytes_per_s=2039e9,
            peak_flops={"bfloat16": 312e12, "float16": 312e12, "int8": 624e12},
            compute_capability=(8, 0),
            num_sms=108,
            smem_bytes=164 * _KIB,
            l2_bytes=40 * _MIB,
            clock_hz=1.41e9,
        ),
        GpuTarget(
            name="gpu-h100",
            device_kind="NVIDIA H100 80GB HBM3",
            hbm_bytes=80 * 10**9,
            hbm_bytes_per_s=3350e9,
            peak_flops={"bfloat16": 989e12, "float16": 989e12, "int8": 1979e12, "float8_e4m3fn": 1979e12},
            compute_capability=(9, 0),
            num_sms=132,
            smem_bytes=228 * _KIB,
            l2_bytes=50 * _MIB,
            clock_hz=1.98e9,
        ),
        GpuTarget(
            name="gpu-h200",
            device_kind="NVIDIA H200",
            hbm_bytes=141 * 10**9,
            hbm_bytes_per_s=4800e9,
            peak_flops={"bfloat16": 989e12, "float16": 989e12, "int8": 1979e12, "float8_e4m3fn": 1979e12},
            compute_capability=(9, 0),
            num_sms=132,
            smem_bytes=228 * _KIB,
            l2_bytes=60 * _MIB,
            clock_hz=1.98e9,
        ),
        GpuTarget(
            name="gpu-b200",
            device_kind="NVIDIA B200",
            hbm_bytes=180 * 10**9,
            hbm_bytes_per_s=8000e9,
            peak_flops={"bfloat16": 2250e12, "float16": 2250e12, "int8": 4500e12, "float8_e4m3fn": 4500e12},
            compute_capability=(10, 0),
            num_sms=148,
            smem_bytes=228 * _KIB,
            l2_bytes=126 * _MIB,
            clock_hz=1.965e9,
        ),
    )
}


def target_named(target: str | Target) -> Target:
    """Return the target of that name.

    Raises:
      ValueError: no target has that name; the message lists the names.

    >>> target_named("tpu-v6e").hbm_bytes
    34359738368
    """
    if isinstance(target, Target):
        return target
    if target not in TARGETS:
        raise ValueError(f"unknown target {target!r}; known are {', '.join(TARGETS)}")
    return TARGETS[target]


def missing_compiler(target: str | Target) -> str | None:
    """Return why `target` cannot be compiled for here, in one line, or None if its compiler is installed."""
    target = target_named(target)
    missing = [module for module in target.compiler_modules if not _is_importable(module)]
    if not missing:
        return None
    return (
        f"the compiler for {target.name} is not installed (no module {', '.join(missing)}); install the extra "
        f"pagedjax[{target.extra}], or in a checkout the dependency group aot (uv sync --group aot)"
    )


def mesh_for(target: str | Target, chips: int = 1, axis: str = "x") -> "jax.sharding.Mesh":
    """Return a mesh of devices of a machine that is not here, along one axis.

    Args:
      target: a target or its name.
      chips: number of devices, as JAX counts them: a TPU v7x chip counts as two.
      axis: name of the mesh's axis.

    Raises:
      CompilerNotInstalledError: the compiler of that target is not importable.
      ValueError: no such target, or no slice of it has that many devices.
    """
    target = target_named(target)
    if chips < 1:
        raise ValueError(f"chips is {chips} but a mesh has at least 1 device")
    if reason := missing_compiler(target):
        raise CompilerNotInstalledError(reason)
    import jax
    import numpy as np

    devices: Any = np.empty(chips, dtype=object)
    devices[:] = target.devices(chips)[:chips]
    return jax.sharding.Mesh(devices, (axis,))


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _quieten_libtpu() -> None:
    """Keep libtpu from looking for a TPU and its metadata server, where there is none; do nothing on a TPU machine."""
    if glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"):
        return
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")  # it holds a lock file: two compilers would clash
