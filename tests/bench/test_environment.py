"""What a record says of the machine and the versions."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import jax

from pagedjax.bench import environment, machine, versions


def test_machine_tells_processor_cores_memory_and_jax_device():
    found = machine()
    assert found["cpu"]
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert found["memory_bytes"] > 1 << 28
    assert found["backend"] == jax.default_backend()
    assert found["device_kind"] == jax.devices()[0].device_kind
    assert found["num_devices"] == len(jax.devices())


def test_machine_does_not_load_jax():
    code = "import sys, pagedjax.bench as b; m = b.machine(); assert 'jax' not in sys.modules; print('backend' in m)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_versions_are_those_of_the_installed_packages():
    found = versions()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {name: found[name] for name in ("jax", "jaxlib", "flax", "numpy", "pagedjax")} == {
        name: version(name) for name in ("jax", "jaxlib", "flax", "numpy", "pagedjax")
    }


def test_the_commit_is_that_of_the_checkout_with_a_mark_for_changed_files(tmp_path, monkeypatch):
    package = tmp_path / "pagedjax" / "bench"
    package.mkdir(parents=True)
    (package / "environment.py").write_text("")
    monkeypatch.setattr(environment, "__file__", str(package / "environment.py"))

    def commit() -> str | None:
        environment._commit.cache_clear()
        return environment._commit()

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        assert commit() is None  # no checkout, though perhaps below one
        git("init")
        git("add", ".")
        git("commit", "-m", "first")
        head = git("rev-parse", "--short=12", "HEAD")
        assert commit() == head
        (package / "environment.py").write_text("changed")
        assert commit() == head + "+"
    finally:
        environment._commit.cache_clear()


def test_this_checkout_is_found():
    root = Path(environment.__file__).resolve().parents[2]
    assert (versions()["commit"] is not None) == (root / ".git").exists()
