"""How things that differ are named: Hub trees, files, templates, kernels, layers, bases, builds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.archive import Archive
from kitbuild.compare.differences import differences
from tests.archive.factory import KERNEL, Run, file, kernel, lock_body, sha256

if TYPE_CHECKING:
    from pathlib import Path

A, B = "a" * 40, "b" * 40


def tree(commit: str, data: bytes = b"x", repo: str = "org/model") -> dict[str, Any]:
    return {
        "repo": repo,
        "revision": "main",
        "commit": commit,
        "path": None,
        "files": [file("model.safetensors", data)],
    }


def model(weights: dict[str, Any] | None, template: bytes | None = None) -> dict[str, Any]:
    chosen = file("chat.jinja", template) if template is not None else None
    return {"weights": weights, "config": None, "tokenizer": None, "chat_template": chosen}


def texts(tmp_path: Path, left: Run, right: Run) -> list[str]:
    sides = [Archive.read(run.write(tmp_path / name)).manifest for run, name in ((left, "left"), (right, "right"))]
    return [item.text for item in differences(sides[0], sides[1])]


def locks(**pairs: tuple[Any, Any]) -> tuple[Run, Run]:
    left, right = ({key: pair[side] for key, pair in pairs.items()} for side in (0, 1))
    return Run(lock=lock_body(**left)), Run(lock=lock_body(**right))


def test_a_hub_tree_is_named_by_its_commits(tmp_path: Path) -> None:
    """One line for a whole checkpoint, not one a file."""
    runs = locks(model=(model(tree(A, b"1")), model(tree(B, b"2"))))
    assert texts(tmp_path, *runs) == ["model org/model@aaaaaaaaaaaa vs org/model@bbbbbbbbbbbb"]


def test_another_commit_with_the_same_files_is_no_difference(tmp_path: Path) -> None:
    """A commit that changed a file which is not used moved no byte."""
    assert texts(tmp_path, *locks(model=(model(tree(A)), model(tree(B))))) == []


def test_one_commit_with_other_bytes_is_named_by_its_files(tmp_path: Path) -> None:
    """A history that was rewritten under the same name would show."""
    one, two = (f"sha256 {sha256(data)[:12]}…" for data in (b"1", b"2"))
    runs = locks(model=(model(tree(A, b"1")), model(tree(A, b"2"))))
    assert texts(tmp_path, *runs) == [f"model model.safetensors {one} vs {two}"]


def test_a_checkpoint_against_none_names_its_files(tmp_path: Path) -> None:
    """What one side lacks is absent there."""
    runs = locks(model=(model(tree(A)), model(None)))
    assert texts(tmp_path, *runs) == [f"model model.safetensors sha256 {sha256(b'x')[:12]}… vs absent"]


def test_a_chat_template_is_named_by_digest(tmp_path: Path) -> None:
    """A replaced template, and one against none."""
    runs = locks(model=(model(None, b"1"), model(None)))
    assert texts(tmp_path, *runs) == [f"chat template sha256 {sha256(b'1')[:12]}… vs absent"]


def test_another_split_or_a_second_dataset_is_named(tmp_path: Path) -> None:
    """Datasets are compared by their place in the list."""
    first = lock_body()["datasets"][0]
    second = first | {"tree": {"path": "more", "files": [file("more.jsonl", b"y")]}}
    runs = locks(datasets=([first], [first | {"split": "test"}, second]))
    assert texts(tmp_path, *runs) == [
        "dataset 0 split train vs test",
        f"dataset 1 more.jsonl absent vs sha256 {sha256(b'y')[:12]}…",
    ]


def test_what_is_evaluated_is_told_apart_from_what_is_trained(tmp_path: Path) -> None:
    """The held-out set decides no loss of training."""
    held = lock_body()["datasets"][0]
    left, right = locks(evaluate=(held, held | {"split": "test"}))
    right.lock["recipe"] = right.lock["recipe"] | {"evaluate": {"examples": 5}}
    sides = [Archive.read(run.write(tmp_path / name)).manifest for run, name in ((left, "l"), (right, "r"))]
    assert [(item.kind, item.text) for item in differences(*sides)] == [
        ("evaluate", "evaluate split train vs test"),
        ("evaluate", "evaluate examples absent vs 5"),
    ]


def test_one_kernel_commit_with_other_files_is_named_by_digest(tmp_path: Path) -> None:
    """The same commit and variant with another byte is another kernel."""
    (text,) = texts(tmp_path, *locks(kernels=([kernel()], [kernel() | {"files": [file("x", b"other")]}])))
    assert text.startswith(f"attention kernel {KERNEL} aaaaaaaaaaaa (torch-universal) files ")


def test_another_layer_for_a_class_is_named(tmp_path: Path) -> None:
    """Two layers of one kernel repository are told apart by the class that they replace."""
    layers = [kernel(role="layers") | {"layers": {"RMSNorm": name}} for name in ("Fast", "Faster")]
    assert texts(tmp_path, *locks(kernels=([layers[0]], [layers[1]]))) == [
        f"layer RMSNorm {KERNEL}:Fast vs {KERNEL}:Faster"
    ]


def test_an_attention_path_without_a_hub_kernel_is_named(tmp_path: Path) -> None:
    """sdpa against eager."""
    runs = [Run(lock=lock_body(kernels=[]), manifest={"attention": {"used": used}}) for used in ("sdpa", "eager")]
    assert texts(tmp_path, runs[0], runs[1]) == ["attention sdpa vs eager"]


def test_liger_patches_are_named(tmp_path: Path) -> None:
    """Each option by its name."""
    right = Run(manifest={"liger": {"options": {"rope": True}, "patched": []}})
    left = Run(manifest={"liger": {"options": {"rope": False}, "patched": []}})
    assert texts(tmp_path, left, right) == ["liger options.rope false vs true"]


def test_a_base_is_named_with_the_packages_that_differ(tmp_path: Path) -> None:
    """The digest, and each Debian package by version."""
    base = lock_body()["base"]
    other = base | {
        "manifest_digest": "sha256:" + sha256("other"),
        "packages": [{"name": "libc6", "version": "2.41", "architecture": "amd64", "sha256": None}],
    }
    one, two = (sha256(text)[:12] for text in ("manifest", "other"))
    assert texts(tmp_path, *locks(base=(base, other))) == [
        f"base kitbuild-base-cpu@{one}… vs kitbuild-base-cpu@{two}…",
        "system package libc6 2.36-9 vs 2.41",
    ]


@pytest.mark.parametrize(
    ("manifest", "text"),
    [
        ({"build": {**Run().body()["build"], "config": "GCC 14"}}, "the library's build configuration differs"),
        ({"arguments": {"learning_rate": 1e-5, "lr_scheduler_kwargs": {"a": 1}}}, "lr_scheduler_kwargs absent vs {'a': 1}"),
        ({"environment": {**Run().body()["environment"], "python": "3.12.1"}}, "python 3.11.2 vs 3.12.1"),
    ],
)  # fmt: skip
def test_the_rest_is_named_in_one_line_each(tmp_path: Path, manifest: dict[str, Any], text: str) -> None:
    """A long build text is not shown; a table against none is."""
    assert texts(tmp_path, Run(), Run(manifest=manifest)) == [text]


def test_a_package_name_is_one_however_it_is_spelt(tmp_path: Path) -> None:
    """huggingface_hub and Huggingface-Hub are one package."""
    left, right = (Run(environment={"packages": {name: "2.4.0"}}) for name in ("huggingface_hub", "Huggingface-Hub"))
    assert texts(tmp_path, left, right) == []


def test_declared_defaults_are_named_by_class(tmp_path: Path) -> None:
    """A default that a library changed between versions."""
    defaults = lock_body()["defaults"]
    other = defaults | {"declared": {"trl.SFTConfig": {"max_grad_norm": 2.0}}}
    assert texts(tmp_path, *locks(defaults=(defaults, other))) == ["default trl.SFTConfig.max_grad_norm 1.0 vs 2.0"]
