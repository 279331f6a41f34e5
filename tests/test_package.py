"""The package as others get it: what it imports, what the wheel holds, and that the wheel works on its own."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import pagedjax

ROOT = Path(__file__).parent.parent
NOT_SOURCE = (".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", "uv.lock")

# Imports everything below pagedjax, in a fresh process, and prints "name<tab>file" of each module that it loaded.
IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
import pagedjax
for module in pkgutil.walk_packages(pagedjax.__path__, "pagedjax."):
    importlib.import_module(module.name)
for name, module in sorted(sys.modules.items()):
    if name.split(".")[0] in ("pagedjax", "kernels"):
        print(name, module.__file__, sep="\\t")
"""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Standard output of a command that succeeds; the command's own message if it does not."""
    environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def uv(*arguments: str | Path, cwd: Path | None = None) -> str:
    found = os.environ.get("UV") or shutil.which("uv")  # `uv run` sets the first
    assert found, "uv is not on PATH; the project's commands and this test need it"
    return run(found, *arguments, cwd=cwd)


def modules_loaded_by(code: str) -> set[str]:
    return set(run(sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)").splitlines()[-1].split())


@pytest.mark.parametrize(
    "code",
    [
        "import pagedjax; dir(pagedjax); pagedjax.__version__",
        "import pagedjax.cache; pagedjax.cache.KVCacheManager",
        "import pagedjax.plan; pagedjax.plan.missing_compiler('tpu-v6e'); pagedjax.plan.missing_compiler('gpu-h200')",
        "import pagedjax.bench; pagedjax.bench.machine(); pagedjax.bench.versions()",
        "import pagedjax.cli\ntry: pagedjax.cli.main(['--help'])\nexcept SystemExit: pass",
        "import pagedjax.cli\ntry: pagedjax.cli.main(['generate', '--help'])\nexcept SystemExit: pass",
    ],
)
def test_what_needs_no_device_does_not_load_jax(code: str):
    loaded = modules_loaded_by(code)
    assert "pagedjax" in loaded
    assert not loaded & {"jax", "jaxlib", "flax"}


def test_the_cache_loads_numpy_and_the_standard_library_only():
    allowed = {"pagedjax", "numpy", *sys.stdlib_module_names, *sys.builtin_module_names}
    top_level = {name.split(".")[0] for name in modules_loaded_by("import pagedjax.cache")}
    before = {name.split(".")[0] for name in modules_loaded_by("")}  # what the environment's own start-up loads
    assert top_level - before - allowed == set()


def test_every_public_name_can_be_had():
    for name in pagedjax.__all__:
        assert getattr(pagedjax, name) is not None
    assert set(pagedjax.__all__) <= set(dir(pagedjax))


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pagedjax.nothing


def test_kernels_are_one_package_in_the_checkout():
    assert_kernels_are_one_package(run(sys.executable, "-c", IMPORT_EVERYTHING, cwd=ROOT))


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout, so no file is committed")
    return [ROOT / name for name in run("git", "ls-files", "-z", cwd=ROOT).split("\0") if name]


def test_no_lock_file_is_committed():
    assert [path.name for path in tracked_files() if path.name in ("uv.lock", "poetry.lock", "package-lock.json")] == []


def test_no_registry_host_is_committed():
    hosts = [("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"), ("debian", "org"), ("crates", "io")]
    pattern = re.compile("|".join(rf"{name}\.{end}\b" for name, end in hosts))
    found = []
    for path in tracked_files():
        if path.is_file() and not path.is_symlink():
            text = path.read_bytes().decode("utf-8", errors="ignore")
            found += [f"{path.relative_to(ROOT)}: {match.group()}" for match in pattern.finditer(text)]
    assert found == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that what an earlier build left in the checkout cannot slip in."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=shutil.ignore_patterns(*NOT_SOURCE))
    uv("build", "--wheel", "--out-dir", folder / "dist", cwd=folder / "source")
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def fresh_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and what it depends on, nothing else."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    uv("venv", "--python", sys.executable, folder)
    uv("pip", "install", "--python", folder, wheel)
    return folder


def names_in(wheel: Path) -> Sequence[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.mark.slow
def test_the_wheel_holds_every_module_the_type_marker_and_the_licence(wheel: Path):
    names = names_in(wheel)
    sources = list(ROOT.glob("pagedjax/**/*.py"))  # does not go through the symlink
    sources += [ROOT / "pagedjax" / path.relative_to(ROOT) for path in ROOT.glob("kernels/**/*.py")]
    modules = {str(path.relative_to(ROOT)) for path in sources}
    assert "pagedjax/kernels/xla/__init__.py" in modules
    assert {name for name in names if name.endswith(".py")} == modules
    assert "pagedjax/py.typed" in names
    assert any(re.fullmatch(r"pagedjax-[^/]+\.dist-info/licenses/LICENSE", name) for name in names)


@pytest.mark.slow
def test_the_wheel_brings_pagedjax_and_no_other_top_level_name(wheel: Path):
    assert {name.split("/")[0] for name in names_in(wheel) if ".dist-info/" not in name} == {"pagedjax"}


@pytest.mark.slow
def test_everything_imports_in_a_fresh_environment(fresh_environment: Path, tmp_path: Path):
    loaded = run(fresh_environment / "bin" / "python", "-c", IMPORT_EVERYTHING, cwd=tmp_path)
    assert_kernels_are_one_package(loaded)
    files = [Path(line.split("\t")[1]) for line in loaded.splitlines()]
    assert all(fresh_environment in path.parents for path in files)


@pytest.mark.slow
def test_the_command_answers_in_a_fresh_environment(fresh_environment: Path, tmp_path: Path):
    command = fresh_environment / "bin" / "pagedjax"
    assert "generate" in run(command, "--help", cwd=tmp_path)
    assert "--max-tokens" in run(command, "generate", "--help", cwd=tmp_path)


def assert_kernels_are_one_package(loaded: str) -> None:
    """Of what IMPORT_EVERYTHING printed: kernels live below pagedjax only, and no file was loaded under two names."""
    lines = [line.split("\t") for line in loaded.splitlines()]
    names = [name for name, _ in lines]
    assert "pagedjax.kernels.xla" in names
    assert not [name for name in names if name.split(".")[0] == "kernels"]
    files = [os.path.realpath(file) for _, file in lines]
    assert len(set(files)) == len(files)
