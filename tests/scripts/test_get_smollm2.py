"""`scripts/get-smollm2` touches nothing it should not, and says what is wrong."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "get-smollm2"
FAKE_UV = """#!/bin/sh
echo "$@" >> "$CALLS"
echo "error: no such wheel"
exit 2
"""


def run(folder: Path, bin_folder: Path, calls: Path) -> subprocess.CompletedProcess[str]:
    """With a Python beside which no uv lies, so that only `bin_folder` is searched."""
    environment = {
        "PATH": str(bin_folder),
        "CALLS": str(calls),
        "KITBUILD_HOME": str(folder.parent / "home"),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    python = Path(sys.executable).resolve()
    command = [str(python), str(SCRIPT), str(folder)]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment)


def fake_uv(folder: Path) -> Path:
    folder.mkdir()
    (folder / "uv").write_text(FAKE_UV, encoding="utf-8")
    (folder / "uv").chmod(0o755)
    (folder / "sh").symlink_to("/bin/sh")
    return folder


def test_a_directory_that_is_no_model_is_left_alone(tmp_path: Path) -> None:
    """A folder with other things in it is refused before anything is fetched."""
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "letter.txt").write_text("dear", encoding="utf-8")
    done = run(folder, fake_uv(tmp_path / "bin"), tmp_path / "calls")
    assert done.returncode == 1
    assert (
        f"get-smollm2: {folder} is there and is no model directory.\nhint: name another, or remove it\n" == done.stderr
    )
    assert (folder / "letter.txt").read_text(encoding="utf-8") == "dear"
    assert not (tmp_path / "calls").exists()


def test_a_failed_fetch_shows_what_the_client_said(tmp_path: Path) -> None:
    """The client's own words are shown, and a model directory that was damaged before stays as it was."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    done = run(folder, fake_uv(tmp_path / "bin"), tmp_path / "calls")
    assert done.returncode == 1
    assert done.stderr.startswith("get-smollm2: fetching the checkpoint failed (exit 2): ")
    assert done.stderr.endswith("\nerror: no such wheel\n")
    assert (folder / "config.json").read_text(encoding="utf-8") == "{}"
    assert {"bin", "calls", "model"} == {path.name for path in tmp_path.iterdir()}


def test_the_wheel_is_asked_for_by_hash_and_kept_in_the_store(tmp_path: Path) -> None:
    """uv is told to demand hashes and to cache under KITBUILD_HOME."""
    run(tmp_path / "model", fake_uv(tmp_path / "bin"), tmp_path / "calls")
    (call,) = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
    assert f"pip install --no-deps --require-hashes --quiet --cache-dir {tmp_path}/home/uv" in call


def test_no_uv_is_said(tmp_path: Path) -> None:
    """Without uv the message names it and where it comes from."""
    (tmp_path / "bin").mkdir()
    done = run(tmp_path / "model", tmp_path / "bin", tmp_path / "calls")
    assert done.returncode == 1
    assert (
        done.stderr
        == "get-smollm2: uv was not found.\nhint: it comes with kitbuild: run this script with kitbuild's Python\n"
    )
