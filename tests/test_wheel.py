"""The wheel that users install carries what kitbuild needs, and works where there is no checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
NEEDED = {
    "kitbuild/_data/images/cpu/packages.toml",
    "kitbuild/_data/images/cpu/bootstrap.toml",
    "kitbuild/_data/images/cuda128/packages.toml",
    "kitbuild/_data/images/cuda129/packages.toml",
    "kitbuild/_data/images/known.toml",
    "kitbuild/_data/Dockerfile.cuda128",
    "kitbuild/_data/Dockerfile.cuda129",
    "kitbuild/lock/advisories.yaml",
    "kitbuild/recipe/starter.yaml",
    "kitbuild/recipe/train_keys.json",
    "kitbuild/compare/page/script.js",
    "kitbuild/compare/page/style.css",
    "kitbuild/guest/entry.py",
    "kitbuild/image/pyc_driver.py",
}
UV = Path(sys.executable).with_name("uv")


def call(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    call(UV, "build", "--wheel", "--out-dir", folder, "--python", sys.executable, REPOSITORY, cwd=folder)
    (made,) = folder.glob("*.whl")
    return made


@pytest.mark.slow
def test_wheel_carries_what_is_needed(wheel: Path) -> None:
    """Every module and data file of the package, the package sets, the Dockerfiles; no test, no cache."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "kitbuild").rglob("*.py")}
    assert (NEEDED | modules) - names == set()
    assert [name for name in names if "__pycache__" in name or name.startswith(("tests/", "recipes/"))] == []


@pytest.mark.slow
def test_installed_wheel_works_anywhere(wheel: Path, tmp_path: Path) -> None:
    """In a fresh environment and an empty folder: stack, init, check, with the same data as the checkout."""
    call(UV, "venv", "--python", sys.executable, tmp_path / "venv", cwd=tmp_path)
    call(UV, "pip", "install", "--python", tmp_path / "venv/bin/python", wheel, cwd=tmp_path)
    kitbuild, work = tmp_path / "venv/bin/kitbuild", tmp_path / "work"
    work.mkdir()
    assert call(kitbuild, "--version", cwd=work).startswith("kitbuild ")
    here = call(sys.executable, "-m", "kitbuild", "stack", "--json", cwd=REPOSITORY)
    assert json.loads(call(kitbuild, "stack", "--json", cwd=work)) == json.loads(here)
    call(kitbuild, "init", "mine", cwd=work)
    assert "mine.yaml is fine" in call(kitbuild, "check", "mine.yaml", cwd=work)
    code = "from kitbuild.guest_files import guest_sha256; print(guest_sha256())"
    assert call(tmp_path / "venv/bin/python", "-c", code, cwd=work) == call(sys.executable, "-c", code, cwd=REPOSITORY)
    assert {path.name for path in work.iterdir()} == {"mine.yaml"}
