"""Two locks side by side: what a person reads, and that nothing is left out."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.lock.changes import changes, lines
from kitbuild.lock.models import (
    Argument,
    Built,
    Defaults,
    Lock,
    LockedDataset,
    LockedFile,
    LockedModel,
    LockedTree,
    MetAdvisory,
    Moved,
    RejectedVariant,
    SystemPackage,
    Upstream,
)
from tests.image.kit import COMMIT, make_base, make_kernel, make_lock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kitbuild.store import Store

A, B = "a" * 64, "b" * 64
DIGEST = f"sha256:{A}"


def file(path: str, sha256: str = A) -> LockedFile:
    return LockedFile(path=path, size=1, sha256=sha256)


def hub_tree(repo: str) -> LockedTree:
    return LockedTree(repo=repo, revision="main", commit=COMMIT, files=(file("config.json"), file("model.safetensors")))


@pytest.fixture
def lock(store: Store) -> Lock:
    """A lock in which no field is empty."""
    kernel = make_kernel(store).model_copy(
        update={
            "redirects": (Moved(repo="org/old", revision="v1", commit=COMMIT),),
            "rejected": (RejectedVariant(variant="torch-cuda", reason="backend"),),
            "layers": {"RMSNorm": "LigerRMSNorm"},
            "member": "attention",
            "metadata_digest": "{}",
            "dependencies": ("org/dep@v1",),
        }
    )
    dataset: dict[str, Any] = {"format": "json", "split": "train", "data_files": ("x",), "config": "c", "weight": 1.0}
    base = make_base(store).model_copy(
        update={
            "upstream": Upstream(name="debian", digest=DIGEST),
            "cuda": "12.9",
            "dockerfile_sha256": A,
            "packages": (SystemPackage(name="libc6", version="2.36", architecture="amd64", sha256=A),),
        }
    )
    made = make_lock(
        store,
        kernels=(kernel,),
        base=base,
        model=LockedModel(
            weights=hub_tree("org/model"),
            config={"model_type": "qwen3"},
            tokenizer=LockedTree(path="tok", files=(file("tokenizer.json"),)),
            chat_template=file("chat.jinja"),
        ),
        datasets=tuple(LockedDataset(tree=hub_tree(f"org/data{n}"), **dataset) for n in range(2)),
        evaluate=LockedDataset(tree=hub_tree("org/held-out"), **dataset),
        defaults=Defaults(
            declared={"trl.SFTConfig": {"loss_type": "nll"}},
            arguments={"loss_type": Argument(value="nll", origin="library")},
            device_dependent=("optim",),
        ),
        launch={"nodes": 1},
        recipe={"train": {"max_length": 4}},
        advisories=(MetAdvisory(id="KIT-1", severity="info"),),
    )
    built = Built(sdist_sha256=A, python="py3", requires=("wheel==1",), env={"TZ": "UTC"})
    wheels = (made.wheels[0], made.wheels[1].model_copy(update={"built": built}))
    return made.model_copy(update={"wheels": wheels})


def told(old: Lock, new: Lock) -> list[str]:
    return lines(changes(old, new))


def test_no_difference(lock: Lock) -> None:
    """A lock differs in nothing from itself, and in nothing from one whose recipe got another comment."""
    assert changes(lock, lock.model_copy(update={"recipe_sha256": B})) == ()


def test_what_a_person_reads(lock: Lock) -> None:
    """Names, versions and the first digits of digests, by part; what came and what went; the reasons follow."""
    torch, tool = lock.wheels
    kernel = lock.kernels[0].model_copy(update={"commit": "d" * 40, "variant": "torch-cpu", "rejected": ()})
    weights = LockedTree(
        repo="org/model",
        revision="v2",
        commit="e" * 40,
        files=(file("config.json", B), file("model.safetensors")),
    )
    new = lock.model_copy(
        update={
            "wheels": (
                torch.model_copy(update={"version": "2.0", "sha256": B}),
                tool.model_copy(update={"name": "pen"}),
            ),
            "kernels": (kernel,),
            "model": lock.model.model_copy(update={"weights": weights}),
            "defaults": lock.defaults.model_copy(
                update={
                    "declared": {"trl.SFTConfig": {"loss_type": "chunked_nll"}},
                    "arguments": {"loss_type": Argument(value="chunked_nll", origin="library")},
                }
            ),
            "advisories": (),
        }
    )
    assert told(lock, new) == [
        "packages:",
        "  + pen 1.0",
        "  - tool 1.0",
        "  torch 1.0 → 2.0",
        "kernels:",
        "  attention org/tiny commit cccccccccccc… → dddddddddddd…",
        "  attention org/tiny variant torch-universal → torch-cpu",
        "model:",
        "  from org/model@main cccccccccccc… → org/model@v2 eeeeeeeeeeee…",
        "  config.json sha256 aaaaaaaaaaaa…, 1 bytes → sha256 bbbbbbbbbbbb…, 1 bytes",
        "library defaults:",
        "  trl.SFTConfig.loss_type nll → chunked_nll",
        "arguments in force:",
        "  loss_type nll (library) → chunked_nll (library)",
        "advisories:",
        "  - KIT-1 info",
    ]


def test_many_files_are_counted(lock: Lock) -> None:
    """A checkpoint of many shards is one line, not one for each."""

    def with_files(digest: str) -> Lock:
        tree = hub_tree("org/model").model_copy(update={"files": tuple(file(f"{n}", digest) for n in range(7))})
        return lock.model_copy(update={"model": lock.model.model_copy(update={"weights": tree})})

    assert told(with_files(A), with_files(B)) == ["model:", "  files 7 → 7, 7 differ"]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        pairs: Any = value.items()
    elif isinstance(value, list):
        pairs = enumerate(value)
    else:
        if value is not None:  # what is not there is the other one of two
            yield path
        return
    for key, item in pairs:
        yield from leaves(item, (*path, key))


def changed(value: Any) -> Any:
    """Another value that its field takes."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if value in {"1.0", "main"} or len(value) < 12:
        return {"info": "error", "json": "csv", "amd64": "arm64", "absent": "present"}.get(value, f"{value}9")
    return value[:-1] + ("1" if value[-1] != "1" else "2")


LEFT_OUT = {("recipe_sha256",), ("version",), ("kernels", 0, "role"), ("defaults", "arguments", "loss_type", "origin")}


def test_no_change_goes_untold(lock: Lock) -> None:
    """Each single value of a whole lock, changed by itself, is a difference that has words."""
    fields = lock.model_dump(mode="json")
    asked = [path for path in leaves(fields) if path not in LEFT_OUT]
    assert len(asked) > 100
    for path in asked:
        other = copy.deepcopy(fields)
        holder = other
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = changed(holder[path[-1]])
        found = changes(lock, Lock.model_validate(other))
        assert found, path
        assert all(str(change) and change.old != change.new for change in found), path
