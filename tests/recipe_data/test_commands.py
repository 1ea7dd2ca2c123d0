"""The chat set of the small recipes is what its scripts make, and its split is honest."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[2] / "recipes" / "data"
TRAIN, HELDOUT = "commands-train.jsonl", "commands-heldout.jsonl"


def run(script: str, *arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-B", str(DATA / script), *arguments]
    environment = {"PYTHONHASHSEED": hash_seed, "LC_ALL": "C", "TZ": "Asia/Tokyo"}
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment)


def column(name: str, role: str) -> list[str]:
    rows = [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]
    return [message["content"] for row in rows for message in row["messages"] if message["role"] == role]


@pytest.mark.parametrize("script", ["make_commands.py", "make_tokenizer.py"])
@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_committed_files_are_what_the_script_makes(script: str, hash_seed: str) -> None:
    """Another hash seed, locale and time zone make the committed bytes."""
    done = run(script, "--check", hash_seed=hash_seed)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_check_names_the_file_that_differs(tmp_path: Path) -> None:
    """One changed byte and one missing file are both told, and nothing is repaired."""
    (tmp_path / TRAIN).write_bytes((DATA / TRAIN).read_bytes().replace(b"attic", b"Attic", 1))
    done = run("make_commands.py", str(tmp_path), "--check")
    assert done.returncode == 1
    assert f"{TRAIN}: not what this script makes\n{HELDOUT}: missing\n" == done.stderr
    assert not (tmp_path / HELDOUT).exists()


def test_check_of_the_tokenizer_names_the_file_that_differs(tmp_path: Path) -> None:
    """A changed template in the tokenizer's folder is told."""
    shutil.copytree(DATA / "tiny-tokenizer", tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("", encoding="utf-8")
    done = run("make_tokenizer.py", str(tmp_path), "--check")
    assert (done.returncode, done.stderr) == (1, "chat_template.jinja: not what this script makes\n")


def test_writing_leaves_nothing_but_the_two_files(tmp_path: Path) -> None:
    """A written folder holds the two files, equal to the committed ones, and no temporary."""
    assert run("make_commands.py", str(tmp_path)).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [HELDOUT, TRAIN]
    assert [(DATA / name).read_bytes() for name in (HELDOUT, TRAIN)] == [
        (tmp_path / name).read_bytes() for name in (HELDOUT, TRAIN)
    ]


def test_rows() -> None:
    """There are 640 conversations to learn from and 96 held out, each a question and an answer."""
    assert [len(column(n, role)) for n in (TRAIN, HELDOUT) for role in ("user", "assistant")] == [640, 640, 96, 96]


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_nothing_stands_on_both_sides(role: str) -> None:
    """No sentence and no command of the held-out rows occurs in training."""
    assert set() == set(column(TRAIN, role)) & set(column(HELDOUT, role))


def test_a_wording_is_kept_for_the_held_out_rows() -> None:
    """Training never says `lamp`, the last way to ask for a light level; the held-out rows do."""
    assert [any(" lamp " in text for text in column(name, "user")) for name in (TRAIN, HELDOUT)] == [False, True]
