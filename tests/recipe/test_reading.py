"""What `read` hands on, and the recipes that the repository ships."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitbuild.errors import Problem, RecipeError, UsageError
from kitbuild.recipe import missing_inputs, notes, read, starter

ROOT = Path(__file__).parents[2]
SHIPPED = [*sorted((ROOT / "recipes").glob("*.yaml")), ROOT / "tests" / "data" / "recipes" / "tiny-kernels.yaml"]
LEAST = """\
kitbuild: 1
name: small
model:
  repo: org/model
dataset:
  repo: org/chats
image:
  cuda: cpu
batch: {global: 4, micro: 2}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def assert_read_or_refused(path: Path) -> None:
    problems: tuple[Problem, ...] | None = None
    try:
        read(path)
    except RecipeError as error:
        problems = error.problems
    assert problems != ()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes(path: Path) -> None:
    """Every recipe of the repository can be used and is named after its file."""
    assert path.stem == read(path).recipe.name


def test_shipped_set() -> None:
    """There is a recipe for each CUDA, and two for a CPU."""
    targets = {path.stem: read(path).recipe.image.target for path in SHIPPED}
    assert (
        targets.items()
        >= {
            "qwen3-0.6b": "cuda129",
            "qwen3-8b": "cuda129",
            "qwen3-8b-cuda128": "cuda128",
            "smollm2-135m-cpu": "cpu",
            "tiny-cpu": "cpu",
            "tiny-kernels": "cpu",
        }.items()
    )


def test_cuda_128_differs_in_cuda_only() -> None:
    """The CUDA 12.8 recipe is the CUDA 12.9 recipe with another name and CUDA."""
    left, right = (read(ROOT / "recipes" / f"qwen3-8b{end}.yaml").recipe.model_dump() for end in ("", "-cuda128"))
    assert {"name", "image"} == {key for key in left if left[key] != right[key]}
    assert {"cuda"} == {key for key in left["image"] if left["image"][key] != right["image"][key]}


def test_tiny_recipe_finds_its_inputs() -> None:
    """The tiny recipe's tokenizer and data are in the repository."""
    assert list(missing_inputs(read(ROOT / "recipes" / "tiny-cpu.yaml"))) == []


def test_loaded_recipe(tmp_path: Path) -> None:
    """The bytes, their digest, the directory and the place of each key come with the recipe."""
    path = write(tmp_path, LEAST)
    loaded = read(path)
    assert hashlib.sha256(LEAST.encode()).hexdigest() == loaded.sha256
    assert (LEAST.encode(), tmp_path, path) == (loaded.content, loaded.directory, loaded.path)
    assert loaded.locate("image.cuda") == (8, 9)
    assert loaded.locate("batch.global") == (9, 17)


def test_locate_falls_back_to_the_parent(tmp_path: Path) -> None:
    """A key that is not written is located at its nearest parent; nothing at all at the top."""
    loaded = read(write(tmp_path, LEAST))
    assert loaded.locate("image.packages.torch") == (8, 3)
    assert loaded.locate("train.learning_rate") == (1, 1)


def test_problem_of_a_later_step(tmp_path: Path) -> None:
    """A later step's problem stands at its key."""
    path = write(tmp_path, LEAST)
    problem = read(path).problem("model.repo", "no such repo", "look again")
    assert f"{path}:4:9: model.repo: no such repo\n  hint: look again" == str(problem)


def test_missing_inputs(tmp_path: Path) -> None:
    """Each local path that is not there is named at its key."""
    text = LEAST.replace("repo: org/model", "path: weights").replace("repo: org/chats", "path: chats.jsonl")
    (tmp_path / "weights").mkdir()
    path = write(tmp_path, text)
    hint = "  hint: paths start from the recipe's directory"
    assert [f"{path}:6:9: dataset.path: chats.jsonl does not exist\n{hint}"] == [
        str(problem) for problem in missing_inputs(read(path))
    ]


@pytest.mark.parametrize("name", ["my-model", "no", "1.5", "0123", "a", "x" * 64])
def test_starter_reads(tmp_path: Path, name: str) -> None:
    """The starter recipe can be used as it is, whatever the name."""
    assert name == read(write(tmp_path, starter(name))).recipe.name


@pytest.mark.parametrize("name", ["", "My Model", "-x", "x" * 65, "a\n"])
def test_starter_refuses_a_name(name: str) -> None:
    """A name that `read` would refuse is refused before a file is written."""
    with pytest.raises(UsageError, match="cannot name a recipe"):
        starter(name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            LEAST + "train: {packing: true}\n",
            [":10:18: train.packing: packed rows with sdpa need a dense quadratic mask: right, but slow"],
        ),
        (
            LEAST + "kernels: {attention: org/flash-attn@v1}\ntrain: {packing: true, packing_strategy: wrapped}\n",
            [":11:42: train.packing_strategy: wrapped packing lets documents attend to each other"],
        ),
        (
            LEAST.replace("cpu", '"12.9"'),
            [":1:1: kernels.attention: strict turns off sdpa's fastest path (cuDNN has no deterministic backward)"],
        ),
        (
            LEAST + "evaluate: {dataset: {repo: org/chats}}\n",
            [":10:21: evaluate.dataset: the rows of training: the score says nothing about new ones"],
        ),
        (
            LEAST.replace("cpu", '"12.9"') + "kernels: {attention: org/flash-attn@v1}\n",
            [":8:9: image.cuda: without image.gpu_archs nobody checks that the kernels are built for your GPU"],
        ),
        (LEAST, []),
    ],
    ids=["packed-sdpa", "wrapped", "strict-sdpa", "same-rows", "no-archs", "none"],
)
def test_notes(tmp_path: Path, text: str, expected: list[str]) -> None:
    """What is right but worth knowing is a note, no refusal."""
    path = write(tmp_path, text)
    found = [str(note).partition("\n")[0].removeprefix(str(path)) for note in notes(read(path))]
    assert found == expected


@settings(max_examples=150, deadline=None)
@given(
    content=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")))
)
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """Whatever the bytes, `read` returns or raises RecipeError with at least one problem."""
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        read(path)
    assert caught.value.problems


YAML_PIECES = st.sampled_from(
    [
        *"{}[],:-?&*!|>'\"#%@`~\n \t",
        "a",
        "1e-5",
        "<<",
        "---",
        "...",
        "!!str",
        "&a",
        "*a",
        "\\",
        "0x1",
        "null",
        "\r",
        "\x85",
    ]
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
KEYS = ["model", "dataset", "image", "batch", "train", "lora", "liger", "launch", "kernels", "determinism", "evaluate"]


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(YAML_PIECES, max_size=30))
def test_any_yaml_punctuation(tmp_path_factory: pytest.TempPathFactory, pieces: list[str]) -> None:
    """Whatever the punctuation after a right recipe, `read` returns or raises RecipeError."""
    path = tmp_path_factory.getbasetemp() / "punctuation.yaml"
    path.write_bytes((LEAST + "".join(pieces)).encode())
    assert_read_or_refused(path)


@settings(max_examples=200, deadline=None)
@given(key=st.sampled_from(KEYS), value=PLAIN)
def test_any_value(tmp_path_factory: pytest.TempPathFactory, key: str, value: object) -> None:
    """Whatever stands under a key, `read` returns or raises RecipeError."""
    import json  # noqa: PLC0415 - JSON with YAML's own escapes is YAML

    path = tmp_path_factory.getbasetemp() / "value.yaml"
    lines = [line for line in LEAST.replace("\n  ", "\x00").splitlines() if not line.startswith(f"{key}:")]
    text = "\n".join(lines).replace("\x00", "\n  ")
    path.write_text(f"{text}\n{key}: {json.dumps(value)}\n", encoding="utf-8")
    assert_read_or_refused(path)


def test_reading_imports_nothing_heavy() -> None:
    """Reading a recipe imports no trainer, no client of the Hub and no network library."""
    code = (
        "import sys, pathlib; from kitbuild.recipe import read; read(pathlib.Path(sys.argv[1]));"
        "print(*sorted({'torch', 'transformers', 'trl', 'peft', 'huggingface_hub', 'requests', 'docker', 'rich'}"
        " & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(ROOT / "recipes" / "tiny-cpu.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
