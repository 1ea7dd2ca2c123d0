"""The arrows between the packages point one way, and the host side never touches what trains."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

# Each imports only what stands left of it.
ORDER = (
    "errors",
    "progress",
    "guest_files",
    "store",
    "recipe",
    "base",
    "lock",
    "image",
    "run",
    "render",
    "archive",
    "compare",
    "bench",
    "flow",
    "terminal",
    "verbs",
    "cli",
    "__main__",
)
APART = "guest"  # goes into the image with `kitbuild/__init__.py` and `errors.py`, and nothing else of ours
TRAINING = frozenset(
    {"torch", "transformers", "trl", "accelerate", "deepspeed", "datasets", "peft", "liger_kernel", "safetensors"}
)
LINES = 300
LONGER = {
    # Longer than a module should be, and no longer than this.
    "kitbuild/cli.py": 400,  # one short function a verb
    "kitbuild/base/registry.py": 310,
    "kitbuild/guest/determinism.py": 325,  # a table
    "kitbuild/recipe/rules.py": 310,  # a table of rules
    "kitbuild/store/download.py": 330,
}


@cache
def modules() -> tuple[Path, ...]:
    return tuple(sorted((REPOSITORY / "kitbuild").rglob("*.py")))


def package_of(module: str) -> str | None:
    """`kitbuild.lock.models` → `lock`; None for `kitbuild` itself, which is below everything."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def imported(source: str, package: str = "") -> set[str]:
    """Every module that a source imports: at the top, lazily in functions, for types only."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                module = ".".join([*above, *([module] if module else [])])
            # `from kitbuild import recipe` names the package in its second half.
            found |= {f"kitbuild.{alias.name}" for alias in node.names} if module == "kitbuild" else {module}
    return found - {"kitbuild.__version__"}


def arrows() -> list[tuple[str, str, str]]:
    """`(file, from, to)` between different packages of ours."""
    found = []
    for path in modules():
        name = path.relative_to(REPOSITORY).with_suffix("").as_posix().replace("/", ".")
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        here = package_of(name.removesuffix(".__init__"))
        for module in imported(path.read_text(encoding="utf-8"), package.removesuffix(".__init__")):
            there = package_of(module) if module.split(".")[0] == "kitbuild" else None
            if here and there and here != there:
                found.append((path.relative_to(REPOSITORY).as_posix(), here, there))
    return found


def test_arrows_point_left() -> None:
    """Each package imports only what stands left of it in the list, be it lazily or for types only."""
    wrong = [
        f"{file} imports {there}"
        for file, here, there in arrows()
        if here != APART and (there == APART or ORDER.index(there) >= ORDER.index(here))
    ]
    assert wrong == []


def test_every_package_has_a_place() -> None:
    """Nothing under kitbuild/ stands outside the order."""
    top = (REPOSITORY / "kitbuild").iterdir()
    found = {path.stem for path in top if path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py")))} - {
        "__init__"
    }
    assert found - {*ORDER, APART} == set()


def test_guest_stands_apart() -> None:
    """The guest imports nothing of the host side but the errors."""
    assert {there for _, here, there in arrows() if here == APART} == {"errors"}


def test_guest_needs_no_host_dependency() -> None:
    """What the guest's files import at all, beyond the standard library, is what the image holds."""
    names = {
        module.split(".")[0]
        for path in modules()
        if path.is_relative_to(REPOSITORY / "kitbuild" / APART)
        for module in imported(path.read_text(encoding="utf-8"))
    }
    host_only = {"pydantic", "typer", "rich", "docker", "requests", "platformdirs", "filelock", "ruamel", "uv"}
    assert names & host_only == set()


def test_host_never_imports_what_trains() -> None:
    """No module outside the guest names torch or a trainer in an import."""
    wrong = [
        f"{path.name} imports {module}"
        for path in modules()
        if not path.is_relative_to(REPOSITORY / "kitbuild" / APART)
        for module in imported(path.read_text(encoding="utf-8"))
        if module.split(".")[0] in TRAINING
    ]
    assert wrong == []


def loaded_by(code: str, folder: Path) -> set[str]:
    """Top-level modules in a fresh interpreter after `code`."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env={"PYTHONPATH": str(REPOSITORY), "KITBUILD_HOME": str(folder / "home"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_check_loads_what_it_needs(tmp_path: Path) -> None:
    """`kitbuild check` loads neither a trainer nor an engine's, a registry's or a Hub's client."""
    code = """
import sys
from kitbuild.cli import app
app(["init", "one"], standalone_mode=False)
app(["check", "one.yaml"], standalone_mode=False)
"""
    heavy = {"docker", "huggingface_hub", "requests", "kernels", "uv", "numpy"}
    assert loaded_by(code, tmp_path) & (TRAINING | heavy) == set()


def test_whole_host_side_loads_without_trainers(tmp_path: Path) -> None:
    """Every host module can be imported, and none brings torch or a trainer along."""
    names = [
        path.relative_to(REPOSITORY).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for path in modules()
        if not path.is_relative_to(REPOSITORY / "kitbuild" / APART)
        # Programs: what they do, they do when they are imported.
        and path.name not in {"__main__.py", "pyc_driver.py"}
    ]
    code = "import importlib\n" + "\n".join(f"importlib.import_module({name!r})" for name in names)
    assert loaded_by(code, tmp_path) & TRAINING == set()


def test_nothing_is_called_utils() -> None:
    """A module is named for what it holds."""
    vague = {"utils", "util", "helpers", "misc", "common"}
    assert [path for path in modules() if path.stem in vague] == []


def test_modules_are_short() -> None:
    """300 lines are enough; the exceptions are listed, and do not grow."""
    long = {}
    for path in modules():
        name = path.relative_to(REPOSITORY).as_posix()
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > LONGER.get(name, LINES):
            long[name] = lines
    assert long == {}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import kitbuild.store.blobs", {"kitbuild.store.blobs"}),
        ("from kitbuild import recipe as r, __version__", {"kitbuild.recipe"}),
        ("def f():\n    from kitbuild.lock.models import Lock", {"kitbuild.lock.models"}),
        ("if TYPE_CHECKING:\n    import docker", {"docker"}),
        ("from . import x", {"kitbuild.lock"}),
        ("from ..store import y", {"kitbuild.store"}),
    ],
)
def test_imports_are_seen_wherever_they_stand(source: str, expected: set[str]) -> None:
    """The reading itself: top, function, types, relative."""
    assert imported(source, "kitbuild.lock") == expected
