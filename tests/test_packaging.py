"""The repository keeps its own rules: packages, locks, imports, settings, files that name no machine."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("engine", "backends", "adapters")

# What must import on a machine without torch: the coordinator, the command line, the rollout sidecar.
TORCH_FREE = (
    "slackwater.engine.errors",
    "slackwater.engine.ports",
    "slackwater.engine.coordinator",
    "slackwater.adapters.cli",
    "slackwater.adapters.sidecar",
)

# The engine knows no vendor: beside the standard library it may import these and nothing else...
ENGINE_MAY_IMPORT = {"msgspec", "numpy", "safetensors", "structlog", "torch"}
# ... of awscrt only its checksum kernels (CRC64NVME outside the GIL; they reach no network) ...
ENGINE_MAY_IMPORT_OF_AWSCRT = re.compile(r"awscrt(\.checksums(\..*)?)?")
# ... and of torch not what belongs to one way of sharding.
ENGINE_MAY_NOT_IMPORT = ("torch.distributed.fsdp", "torch.distributed._composable", "torch.nn.parallel")

# Imports run one way, adapters -> engine <- backends. These modules of adapters/ put the three together.
COMPOSITION = {"cli", "stores"}
ALLOWED_FOLDERS = {
    "engine": {"engine"},
    "backends": {"backends", "engine"},
    "adapters": {"adapters", "engine"},
    "composition": {"adapters", "backends", "engine"},
}

JOB_LOCK, CORE_LOCK = "requirements/job.lock", "requirements/core.lock"
SETTINGS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command without what an outer `make` leaves in the environment; output is captured as text."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=kept, capture_output=True, text=True, check=False)


# -- packages ---------------------------------------------------------------------------------------------


def test_every_package_is_listed() -> None:
    """Each folder with an `__init__.py` under the three is installed, and no other is listed."""
    found = {
        "slackwater." + ".".join(init.parent.relative_to(ROOT).parts)
        for folder in FOLDERS
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert set(SETTINGS["tool"]["setuptools"]["packages"]) == found


@pytest.mark.parametrize("folder", FOLDERS)
def test_packages_are_typed(folder: str) -> None:
    """Type checkers of a user's project read our annotations."""
    assert (ROOT / folder / "py.typed").is_file()
    assert "py.typed" in SETTINGS["tool"]["setuptools"]["package-data"]["*"]


def build_wheel(folder: Path) -> Path:
    """Build the wheel from a copy of what git would commit, so that the checkout stays clean."""
    source = folder / "source"
    for name in tracked_files():
        if name.split("/")[0] in {*FOLDERS, "pyproject.toml", "README.md", "LICENSE"}:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    built = run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder / "dist", ".", cwd=source)
    assert built.returncode == 0, built.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


@pytest.mark.real
def test_wheel_holds_only_slackwater(tmp_path: Path) -> None:
    """An install puts `slackwater/` into site-packages, whole, and nothing else."""
    names = zipfile.ZipFile(build_wheel(tmp_path)).namelist()
    ours = {name for name in names if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in ours} == {"slackwater"}
    modules = {str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    markers = {f"{folder}/py.typed" for folder in FOLDERS}
    assert ours == {f"slackwater/{name}" for name in modules | markers}


# -- torch-free parts -------------------------------------------------------------------------------------

IMPORT_WITHOUT_TORCH = """
import importlib, importlib.abc, sys
class Forbid(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers"}:
            raise ImportError(f"{name} was imported")
sys.meta_path.insert(0, Forbid())
importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize("module", TORCH_FREE)
def test_imports_without_torch(module: str) -> None:
    """The coordinator, the command line and the sidecar import where torch cannot be."""
    done = run(sys.executable, "-c", IMPORT_WITHOUT_TORCH, module)
    assert done.returncode == 0, done.stderr


def test_the_torch_guard_can_fail() -> None:
    """The check above notices an import of torch."""
    done = run(sys.executable, "-c", IMPORT_WITHOUT_TORCH, "torch")
    assert done.returncode != 0
    assert "torch was imported" in done.stderr


@pytest.mark.real
def test_core_lock_is_enough(tmp_path: Path) -> None:
    """A new environment with core.lock and our wheel, without torch, imports what TORCH_FREE lists."""
    python = tmp_path / "venv" / "bin" / "python"
    assert run(sys.executable, "-m", "venv", tmp_path / "venv").returncode == 0
    pip = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps")
    locked = run(*pip, "--require-hashes", "-r", ROOT / CORE_LOCK)
    assert locked.returncode == 0, locked.stderr
    installed = run(*pip, build_wheel(tmp_path))
    assert installed.returncode == 0, installed.stderr
    consistent = run(python, "-m", "pip", "check")
    assert consistent.returncode == 0, consistent.stdout
    script = "import importlib, importlib.util as u, sys\nassert u.find_spec('torch') is None\n"
    script += "for name in sys.argv[1:]: importlib.import_module(name)"
    imported = run(python, "-c", script, *TORCH_FREE, cwd=tmp_path)
    assert imported.returncode == 0, imported.stderr


# -- locks ------------------------------------------------------------------------------------------------


def read_lock(name: str) -> dict[str, set[str]]:
    """The versions that a lock pins for each package (one for each Python, where they differ)."""
    pins: dict[str, set[str]] = {}
    for line in (ROOT / name).read_text().splitlines():
        if match := re.match(r"([A-Za-z0-9._-]+)==([^ ]+)", line):
            pins.setdefault(canonicalize_name(match[1]), set()).add(match[2])
    return pins


def wanted(extra: str) -> Iterator[Requirement]:
    """What an extra of pyproject.toml asks for, through the extras of ours that it names; '' is the core."""
    project = SETTINGS["project"]
    for line in project["optional-dependencies"][extra] if extra else project["dependencies"]:
        requirement = Requirement(line)
        if requirement.name == "slackwater":
            for inner in requirement.extras:
                yield from wanted(inner)
        else:
            yield requirement


@pytest.mark.parametrize(("lock", "extras"), [(JOB_LOCK, ("", "dev")), (CORE_LOCK, ("",))])
def test_locks_fit_the_project(lock: str, extras: tuple[str, ...]) -> None:
    """Each dependency is pinned in its range (torch apart, it has its own line in the Makefile)."""
    pins = read_lock(lock)
    for requirement in (requirement for extra in extras for requirement in wanted(extra)):
        versions = pins.get(canonicalize_name(requirement.name), set())
        fits = versions and all(requirement.specifier.contains(version) for version in versions)
        assert fits or requirement.name == "torch", f"{lock} does not fit {requirement}: make lock"


@pytest.mark.parametrize("lock", [JOB_LOCK, CORE_LOCK])
def test_locks_are_hashed_and_without_gpu_parts(lock: str) -> None:
    """Every pin has a hash, and neither torch nor the CUDA packages behind it are in a lock."""
    blocks = re.split(r"\n(?=[A-Za-z0-9])", (ROOT / lock).read_text())
    assert all("--hash=sha256:" in block for block in blocks if not block.startswith("#"))
    assert not [name for name in read_lock(lock) if re.match(r"(torch|triton)$|nvidia-|cuda-", name)]


def test_locks_agree() -> None:
    """A package has the same version in the core as in the job."""
    job, core = read_lock(JOB_LOCK), read_lock(CORE_LOCK)
    assert {name: (pins, job.get(name)) for name, pins in core.items() if job.get(name) != pins} == {}


# -- imports ----------------------------------------------------------------------------------------------


def imports_of(path: Path, root: Path = ROOT) -> Iterator[str]:
    """The absolute name of everything that a file of ours imports, wherever in the file it does so."""
    package = path.relative_to(root).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = ("slackwater", *package)[: len(package) + 2 - node.level] if node.level else ()
            base = ".".join([*start, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def is_free_of_vendors(name: str) -> bool:
    """Whether the engine may import `name`."""
    known = ENGINE_MAY_IMPORT | {"slackwater"} | sys.stdlib_module_names
    return name.split(".")[0] in known or ENGINE_MAY_IMPORT_OF_AWSCRT.fullmatch(name) is not None


def faults_of(path: Path, root: Path = ROOT) -> list[str]:
    """The imports of a file that break the rule of its folder, in words."""
    folder, module = path.relative_to(root).parts[0], path.relative_to(root).parts[1]
    composes = folder == "adapters" and Path(module).stem.split("_")[0] in COMPOSITION
    allowed = ALLOWED_FOLDERS["composition" if composes else folder]
    faults = []
    for name in imports_of(path, root):
        top, _, rest = name.partition(".")
        if top == "slackwater" and rest and rest.split(".")[0] not in allowed:
            faults.append(f"{name}: not from {folder}/")
        if top in FOLDERS:
            faults.append(f"{name}: imports of our own are relative")
        if folder == "engine" and not is_free_of_vendors(name):
            faults.append(f"{name}: the engine knows no vendor")
        if folder == "engine" and name.startswith(ENGINE_MAY_NOT_IMPORT):
            faults.append(f"{name}: the engine knows no way of sharding")
    return faults


def test_imports_run_one_way() -> None:
    """adapters -> engine <- backends, no vendor in the engine, and only COMPOSITION joins the three."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert files
    assert {str(path.relative_to(ROOT)): faults for path in files if (faults := faults_of(path))} == {}


@pytest.mark.parametrize(
    ("name", "line", "is_fault"),
    [
        ("engine/a.py", "from ..backends.etcd import Store", True),
        ("engine/a.py", "from .. import adapters", True),
        ("engine/a.py", "def f() -> None:\n    import grpc", True),
        ("engine/a.py", "from torch.distributed.fsdp import fully_shard", True),
        ("engine/a.py", "from torch.distributed import fsdp", True),
        ("engine/a.py", "from awscrt import http", True),
        ("engine/a.py", "from awscrt import checksums", False),
        ("engine/a.py", "from .ports import KV\nimport msgspec, json, torch", False),
        ("backends/a.py", "from ..adapters import cli", True),
        ("backends/a.py", "import etcd3\nfrom ..engine.ports import KV", False),
        ("adapters/trainer.py", "from ..backends.etcd import Store", True),
        ("adapters/trainer.py", "from engine.ports import KV", True),
        ("adapters/cli_status.py", "from ..backends.etcd import Store", False),
        ("adapters/fsdp/a.py", "from ...backends.etcd import Store", True),
    ],
)
def test_the_import_rule_can_fail(tmp_path: Path, name: str, line: str, is_fault: bool) -> None:
    """The check above notices each kind of wrong import, and no right one."""
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert bool(faults_of(path, tmp_path)) == is_fault


# -- settings ---------------------------------------------------------------------------------------------


def test_type_checks_are_strict() -> None:
    """mypy is strict for the three packages, and no override switches it off for a part of them."""
    mypy = SETTINGS["tool"]["mypy"]
    assert mypy["strict"] is True
    assert mypy["packages"] == [f"slackwater.{folder}" for folder in FOLDERS]
    for table in (mypy, *mypy.get("overrides", [])):
        assert not {"ignore_errors", "disable_error_code"} & set(table)
    foreign = [override["module"] for override in mypy.get("overrides", [])]
    names = [name for entry in foreign for name in ([entry] if isinstance(entry, str) else entry)]
    assert not [name for name in names if name.startswith(("slackwater", "*"))]


def test_each_lint_exception_has_its_reason() -> None:
    """A rule that is ignored says why on its own line, and no rule is ignored for a whole package of ours."""
    text = (ROOT / "pyproject.toml").read_text()
    lines = text[text.index("[tool.ruff.lint]") :].splitlines()
    table = SETTINGS["tool"]["ruff"]["lint"]
    by_file = table.get("per-file-ignores", {})
    for name in [*table["ignore"], *by_file]:
        (line,) = (line for line in lines if line.strip().startswith(f'"{name}"'))
        assert "#" in line, f"{name} has no reason"
    assert not [name for name in by_file if name.startswith(FOLDERS) and "*" in name]


def test_tests_are_strict() -> None:
    """Warnings are errors, a test has a time limit, and an unknown marker is an error."""
    pytest_settings = SETTINGS["tool"]["pytest"]["ini_options"]
    assert pytest_settings["filterwarnings"][0] == "error"
    assert 0 < pytest_settings["timeout"] <= 300
    assert {"--strict-markers", "--strict-config"} <= set(pytest_settings["addopts"])


# -- files ------------------------------------------------------------------------------------------------

# Written so that this file does not contain what it looks for.
MACHINE_PATH = re.compile(r"(?<![\w.$}/~-])/(work|tmp|home|root|opt)/[\w.]")
REGISTRY_HOST = re.compile(
    r"\b(pypi|pythonhosted|npmjs|download\.pytorch|deb\.debian|anaconda|crates)\.(org|com|io)\b",
    re.IGNORECASE,
)


def tracked_files() -> list[str]:
    """The files that git has or would take, by their path from the root."""
    listed = run("git", "ls-files", "-co", "--exclude-standard", "-z")
    assert listed.returncode == 0, listed.stderr
    return sorted({name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()})


def test_files_name_no_machine_and_no_registry() -> None:
    """Nothing here works only on the machine where it was written, or names where its packages came from."""
    found = []
    for name in tracked_files():
        text = (ROOT / name).read_bytes().decode("utf-8", errors="replace")
        for pattern in (MACHINE_PATH, REGISTRY_HOST):
            found += [f"{name}: {match[0]}" for match in pattern.finditer(text)]
    assert found == []


# -- make -------------------------------------------------------------------------------------------------


def test_make_lists_its_targets() -> None:
    """`make` alone says what there is, and does nothing."""
    done = run("make", "--no-print-directory")
    assert done.returncode == 0, done.stderr
    for target in ("env", "sglang-env", "demo", "check", "test", "soak", "lock", "clean"):
        assert re.search(rf"^  make {target} +\S", done.stdout, re.MULTILINE), target


def test_make_asks_for_a_new_enough_python() -> None:
    """A Python that is missing or too old gets one clear line, before anything is made."""
    done = run("make", "--no-print-directory", "python", "PYTHON=no-such-python")
    assert done.returncode == 2
    assert "Python 3.11 or newer" in done.stderr


def test_ci_runs_make_test() -> None:
    """The CI script is executable and ends in `make test`."""
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().rstrip().endswith("\nmake test")


@pytest.mark.parametrize(("code", "shown"), [(0, False), (3, True)])
def test_a_step_passes_on_the_exit_code(code: int, shown: bool) -> None:
    """A set-up step says that it started and how it ended, and shows the output only of a failed one."""
    command = f"print('why'); raise SystemExit({code})"
    done = run(sys.executable, "requirements/step.py", "a step", sys.executable, "-c", command)
    assert done.returncode == code
    assert "a step ...\na step: " in done.stdout
    assert ("why" in done.stderr) == shown
