"""Every target compiles, and its figures agree with those of the compilers."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec

from pagedjax.plan.targets import GpuTarget, Target, TpuTarget, mesh_for

MIB = 1 << 20


def compile_gram(target: Target, chips: int) -> jax.stages.Compiled:
    """tanh(a @ a.T) for a bfloat16 [1024, 1024] whose rows are spread over the chips."""
    mesh = mesh_for(target, chips)
    spec = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("x")))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(lambda a: jnp.tanh(a @ a.T)).lower(spec).compile()


def test_a_matrix_product_compiles_for_one_chip(target: Target):
    memory = compile_gram(target, 1).memory_analysis()
    assert memory.argument_size_in_bytes == 2 * MIB
    assert memory.output_size_in_bytes == 2 * MIB


def test_a_sharded_matrix_product_compiles_for_eight_chips_with_a_collective(target: Target):
    compiled = compile_gram(target, 8)
    assert compiled.memory_analysis().argument_size_in_bytes == 2 * MIB // 8
    text = compiled.as_text()
    assert "all-gather" in text or "collective-permute" in text


def test_a_mesh_has_the_devices_that_were_asked_for(target: Target):
    for chips in (1, 3, 4, 16, 64):
        mesh = mesh_for(target, chips, axis="heads")
        assert mesh.shape == {"heads": chips}
        assert {device.device_kind for device in mesh.devices.flat} == {target.device_kind}
        assert len({device.id for device in mesh.devices.flat}) == chips


def test_too_many_chips_are_refused_with_the_largest_slice(target: Target):
    if isinstance(target, GpuTarget):
        assert mesh_for(target, 1024).size == 1024  # hosts of eight, as many as asked for
    else:
        with pytest.raises(ValueError, match=r"chips is 1000 but the largest slice of \S+ known has \d+"):
            mesh_for(target, 1000)


@pytest.mark.parametrize("target", ["tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x"], indirect=True)
def test_figures_agree_with_what_pallas_knows_of_the_chip(target: TpuTarget):
    with jax.sharding.use_abstract_mesh(mesh_for(target).abstract_mesh):
        known = pltpu.get_tpu_info()
    cores = target.num_cores  # Pallas counts one core
    assert known.num_cores == cores
    assert known.vmem_capacity_bytes == target.vmem_bytes
    assert known.hbm_capacity_bytes * cores == pytest.approx(target.hbm_bytes, rel=0.02)
    assert known.mem_bw_bytes_per_second * cores == pytest.approx(target.hbm_bytes_per_s, rel=0.15)  # v5p: 2460, 2765e9
    assert known.bf16_ops_per_second * cores == pytest.approx(target.peak_flops["bfloat16"], rel=0.02)
    if known.fp8_ops_per_second:
        assert known.fp8_ops_per_second * cores == pytest.approx(target.peak_flops["float8_e4m3fn"], rel=0.02)
