"""Every locked byte is looked at: 200 wrong ones, and files that were added, removed or replaced."""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING

import pytest

from kitbuild.errors import KitbuildError, VerificationError
from kitbuild.guest.config import Config
from kitbuild.guest.verify import Verification
from tests.guest.root import ATTENTION_COMMIT, relist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.guest.root import Root

PLACES = 200
SEED = 20261130
SITE = "opt/kit/lib/python3.11/site-packages"
KERNEL = f"kit/kernels/kernels--kernels-community--flash-attn2/snapshots/{ATTENTION_COMMIT}/build/torch-cpu"
INSTALLED = {
    f"{SITE}/torch/__init__.py": b"import os\n" * 50,
    f"{SITE}/torch/lib/libtorch.so": bytes(range(256)) * 300,
    f"{SITE}/torch/__pycache__/__init__.cpython-311.pyc": bytes(reversed(range(256))) * 8,
    f"{SITE}/torch-2.13.0.dist-info/RECORD": b"torch/__init__.py,sha256=x,1\n",
    "opt/kit/bin/kit": b"#!/opt/kit/bin/python\n",
    "opt/kit/pyvenv.cfg": b"home = /usr/bin\n",
}


def verify(root: Root, **environ: str) -> None:
    Verification(Config.read(root.environ | environ), environ).wait()


@pytest.fixture
def tree(build: Callable[..., Root]) -> Root:
    """Model, tokenizer, chat template, data, held-out rows, kernels, a lock, and an environment with wheels."""
    evaluate = {"dataset": {"path": "heldout.jsonl"}, "examples": 6}
    model = {"path": "model", "dtype": "bfloat16", "chat_template": "generation.jinja"}
    root = build(evaluate=evaluate, model=model)
    for name, data in INSTALLED.items():
        (root.path / name).parent.mkdir(parents=True, exist_ok=True)
        (root.path / name).write_bytes(data)
    (root.path / "opt/kit/bin/python").symlink_to("/usr/bin/python3")
    relist(root.path, *INSTALLED, links={"/opt/kit/bin/python": "/usr/bin/python3"})
    return root


def flips(root: Root) -> Iterator[tuple[Path, int, int]]:
    """Files in turn, so that each is met; place and bit by a fixed seed."""
    chosen = random.Random(SEED)  # noqa: S311 - the same places each time
    files = sorted(path for path in root.path.rglob("*") if path.is_file() and not path.is_symlink())
    for number in range(PLACES):
        path = files[number % len(files)]
        yield path, chosen.randrange(path.stat().st_size), 1 << chosen.randrange(8)


def test_one_byte_anywhere(tree: Root) -> None:
    """A flipped bit at each of 200 places is exit 7 and names the file; each kind of file is met."""
    verify(tree)
    met = set()
    for path, place, bit in flips(tree):
        right = path.read_bytes()
        path.write_bytes(right[:place] + bytes([right[place] ^ bit]) + right[place + 1 :])
        name = "/" + path.relative_to(tree.path).as_posix()
        with pytest.raises(KitbuildError) as caught:
            verify(tree)
        assert caught.value.exit_code == 7, f"{name} byte {place} bit {bit}: {caught.value.message}"
        named = [problem.file for problem in caught.value.problems]
        assert name in named or name == "/kit/content.json", f"{name} byte {place} bit {bit}: {named}"
        assert str(named[0]) in caught.value.message
        path.write_bytes(right)
        met.add(name)
    verify(tree)
    expected = {"/kit/lock.json", "/kit/recipe.yaml", "/kit/content.json", "/inputs/chat_template.jinja"}
    assert expected | {f"/{name}" for name in INSTALLED} <= met
    for top in ("/kit/kernels/kernels--kernels-community--flash", "/kit/kernels/kernels--kernels-community--liger"):
        assert any(name.startswith(top) for name in met)
    assert {"/inputs/model/model.safetensors", "/inputs/data/0/chats.jsonl", "/inputs/evaluate/chats.jsonl"} <= met


@pytest.mark.parametrize(
    "name",
    [
        f"{SITE}/evil.pth",
        f"{SITE}/sitecustomize.py",
        f"{SITE}/torch/__pycache__/extra.cpython-311.pyc",
        f"{KERNEL}/extra.py",
        "kit/kernels/kernels--a--b/refs/main",
        "inputs/model/adapter_config.json",
        "inputs/data/0/more.jsonl",
        "inputs/data/1/chats.jsonl",
        "inputs/tokenizer/tokenizer.json",
    ],
)
def test_added_file(tree: Root, name: str) -> None:
    """A file that nobody locked, where only kitbuild puts files, is named."""
    (tree.path / name).parent.mkdir(parents=True, exist_ok=True)
    (tree.path / name).write_text("")
    with pytest.raises(VerificationError) as caught:
        verify(tree)
    (problem,) = caught.value.problems
    assert f"/{name}".startswith(str(problem.file))
    assert problem.message == "is in no lock"


def test_added_template(build: Callable[..., Root]) -> None:
    """A chat template beside the inputs would be taken for the model's: it is named where the lock has none."""
    root = build()
    (root.path / "inputs/chat_template.jinja").write_text("")
    with pytest.raises(VerificationError) as caught:
        verify(root)
    assert [problem.file for problem in caught.value.problems] == ["/inputs/chat_template.jinja"]


EVERY_KIND = [
    "kit/recipe.yaml",
    f"{KERNEL}/flash_attn.py",
    f"{SITE}/torch/__init__.py",
    "inputs/model/model.safetensors",
    "inputs/data/0/chats.jsonl",
]


@pytest.mark.parametrize("name", EVERY_KIND)
def test_removed_file(tree: Root, name: str) -> None:
    """A missing file is named."""
    (tree.path / name).unlink()
    with pytest.raises(VerificationError) as caught:
        verify(tree)
    assert [(problem.file, problem.message) for problem in caught.value.problems] == [(f"/{name}", "is missing")]


@pytest.mark.parametrize("name", EVERY_KIND)
def test_replaced_by_a_link(tree: Root, tmp_path: Path, name: str) -> None:
    """A link to the same bytes is refused: they could be others when they are read."""
    (tree.path / name).rename(tmp_path / "elsewhere")
    (tree.path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(VerificationError) as caught:
        verify(tree)
    messages = {problem.file: problem.message for problem in caught.value.problems}
    assert messages == {f"/{name}": "is a link, and the lock says a file"}


@pytest.mark.parametrize("name", [f"{SITE}/torch", KERNEL])
def test_folder_replaced_by_a_link(tree: Root, tmp_path: Path, name: str) -> None:
    """A folder that became a link is refused, though every byte behind it is right."""
    (tree.path / name).rename(tmp_path / "elsewhere")
    (tree.path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(VerificationError) as caught:
        verify(tree)
    messages = {problem.file: problem.message for problem in caught.value.problems}
    assert messages == {f"/{name}": "a link, and is in no lock"}


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_replaced_by_no_file(tree: Root, kind: str) -> None:
    """A pipe in a file's place is told at once, and nobody waits for it; so is a folder."""
    path = tree.path / f"{SITE}/torch/__init__.py"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    begun = time.monotonic()
    with pytest.raises(VerificationError, match=r"torch/__init__\.py"):
        verify(tree)
    assert time.monotonic() - begun < 30


def test_rewritten_list(tree: Root) -> None:
    """A list of files that was made to fit a changed file does not fit the image's digest, nor the lock."""
    path = tree.path / f"{SITE}/torch/__init__.py"
    path.write_text("other")
    relist(tree.path, f"{SITE}/torch/__init__.py")
    verify(tree)  # Without the image's digest, the list is all there is.
    with pytest.raises(VerificationError) as caught:
        verify(tree, KIT_IMAGE='{"content_sha256": "' + "0" * 64 + '"}')
    assert caught.value.problems[0].message == "cannot be read: it is not the one of this image"
    data = tree.path / "inputs/model/model.safetensors"
    kernel = tree.path / f"{KERNEL}/flash_attn.py"
    for changed in (data, kernel):
        changed.write_bytes(changed.read_bytes() + b"\n")
        relist(tree.path, changed.relative_to(tree.path).as_posix())
        with pytest.raises(VerificationError) as caught:
            verify(tree)
        assert any(problem.message == "content.json and the lock disagree" for problem in caught.value.problems)


def test_known_at_once(tree: Root) -> None:
    """An addition or a variable is known before the bytes are, so that nothing is imported; a wrong byte is not."""
    right = Verification(Config.read(tree.environ), {})
    assert right.refused is False
    right.wait()
    refused = Verification(Config.read(tree.environ), {"LOCAL_KERNELS": "a/b=/tmp"})
    assert refused.refused is True
    refused.close()


def test_message_counts(tree: Root) -> None:
    """Many differences are counted, five are named on the first line, all are in the list."""
    for name in INSTALLED:
        (tree.path / name).write_text("other")
    with pytest.raises(VerificationError) as caught:
        verify(tree)
    assert caught.value.message.startswith(f"{len(INSTALLED)} of ")
    assert caught.value.message.endswith(" and 1 more")
    assert len(caught.value.problems) == len(INSTALLED) == 6
