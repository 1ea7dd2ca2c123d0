"""A recipe becomes a lock: the same bytes everywhere, nothing moves unasked, and what is known to be bad is told first.

The Hub and the package index are this machine's own; the recipe is `recipes/qwen3-8b.yaml` as it is committed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kitbuild import recipe as recipes
from kitbuild.base import bases
from kitbuild.base.build import definition
from kitbuild.base.targets import load_target
from kitbuild.errors import ImageError, RecipeError, ResolveError
from kitbuild.lock.models import LockedWheel
from kitbuild.lock.pins import pins_of
from kitbuild.lock.resolve import resolve, system_of
from kitbuild.progress import Silent
from kitbuild.store import Store
from tests.base import made
from tests.headline.stand_ins import LINUX, TORCH, publish, publish_packages
from tests.hub.fixtures import READER_TOKEN, standard_hub
from tests.lock.package_index import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kitbuild.lock.models import Lock
    from tests.hub.server import HubServer
    from tests.lock.package_index import PackageIndex

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "qwen3-8b.yaml"
NO_ENGINE = made.raising(ImageError("no engine answers"))


@pytest.fixture(scope="module")
def index() -> Iterator[PackageIndex]:
    with serving() as running:
        publish_packages(running)
        yield running


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    """A Hub of the test's own, since branches move here."""
    with standard_hub(tmp_path / "hub") as running:
        yield running


@pytest.fixture
def environ(hub: HubServer, index: PackageIndex, tmp_path: Path) -> dict[str, str]:
    """Everything that a machine is told."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "KITBUILD_HOME": str(tmp_path / "store"),
        **hub.environment(tmp_path / "hf"),
        "UV_DEFAULT_INDEX": index.url,
        "UV_CACHE_DIR": str(tmp_path / "uv"),
        "UV_NO_CONFIG": "1",
        "PIP_CONFIG_FILE": os.devnull,
    }


@pytest.fixture
def store(environ: dict[str, str]) -> Store:
    return with_base(Store.open(environ))


def with_base(store: Store) -> Store:
    """The store with a base for each CUDA target, as if it had been made here."""
    for target in ("cuda129", "cuda128"):
        name = f"kitbuild/base-{target}"
        bases.remember_name(store, made.add(store, name, mark=target), definition=definition(load_target(target)))
    return store


class Machine:
    """Resolves copies of the recipe in a folder of its own."""

    def __init__(self, folder: Path, environ: dict[str, str], store: Store) -> None:
        self.path, self.environ, self.store = folder / "recipe.yaml", environ, store
        self.path.write_bytes(RECIPE.read_bytes())

    def edit(self, old: str, new: str) -> None:
        text = self.path.read_text()
        assert text.count(old) == 1
        self.path.write_text(text.replace(old, new))

    def lock(self, previous: Lock | None = None, *update: str) -> Lock:
        return resolve(
            recipes.read(self.path),
            store=self.store,
            environ=self.environ,
            progress=Silent(),
            client=NO_ENGINE,
            previous=previous,
            update=frozenset(update),
        )


@pytest.fixture
def machine(tmp_path: Path, environ: dict[str, str], store: Store) -> Machine:
    return Machine(tmp_path, environ, store)


def commits(lock: Lock) -> dict[str, str]:
    found = {kernel.repo: kernel.commit for kernel in lock.kernels}
    assert lock.model.weights is not None
    return found | {str(tree.repo): str(tree.commit) for tree in (lock.model.weights, lock.datasets[0].tree)}


def move_everything(hub: HubServer) -> None:
    """A commit on every branch that the recipe names."""
    for repo, branch, kind in (
        ("Qwen/Qwen3-8B", "main", "model"),
        ("trl-lib/Capybara", "main", "dataset"),
        ("kernels-community/flash-attn2", "v2", "kernel"),
        ("kernels-community/liger-kernels", "v3", "kernel"),
    ):
        hub.commit(repo, {"NEWS.md": "news\n"}, branch, kind=kind)  # type: ignore[arg-type]


def test_the_same_bytes_anywhere(machine: Machine, environ: dict[str, str], tmp_path: Path) -> None:
    """Clock, locale, hash seed, mask, and the places of store and recipe do not enter the lock."""
    expected = machine.lock().to_bytes()
    elsewhere = tmp_path / "another" / "place é"
    elsewhere.mkdir(parents=True)
    (elsewhere / "recipe.yaml").write_bytes(RECIPE.read_bytes())
    strange = {"TZ": "Asia/Kathmandu", "LC_ALL": "C", "LANG": "tr_TR.UTF-8", "PYTHONHASHSEED": "5", "PYTHONUTF8": "0"}
    breaking = {"LOCAL_KERNELS": "kernels-community/flash-attn2=/tmp", "HF_HUB_DISABLE_TELEMETRY": "1"}
    environ = {**environ, **strange, **breaking, "KITBUILD_HOME": str(elsewhere / "store"), "HOME": str(elsewhere)}
    with_base(Store.open(environ))
    done = subprocess.run(
        [sys.executable, "-c", "from kitbuild.cli import main; main()", "lock", "recipe.yaml", "--json"],
        cwd=elsewhere,
        env=environ,
        umask=0o077,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (elsewhere / "recipe.lock.json").read_bytes() == expected
    told = json.loads(done.stdout)
    assert told["changed"] is True
    assert told["lock_sha256"] == machine.lock().sha256
    for secret in (environ["HF_ENDPOINT"], "127.0.0.1", str(tmp_path), "://"):
        assert secret.encode() not in expected


def test_nothing_moves_unasked(machine: Machine, hub: HubServer) -> None:
    """Locked again after every branch moved, all commits stay; `--update` moves the one repository that it names."""
    before = machine.lock()
    move_everything(hub)
    assert machine.lock(before) == before
    after = commits(machine.lock(before, "Qwen/Qwen3-8B"))
    assert after == {**commits(before), "Qwen/Qwen3-8B": hub.sha("Qwen/Qwen3-8B", kind="model")}
    kernel = commits(machine.lock(before, "kernels-community/flash-attn2"))
    assert kernel["kernels-community/flash-attn2"] == hub.sha("kernels-community/flash-attn2", "v2", kind="kernel")
    assert kernel["Qwen/Qwen3-8B"] == commits(before)["Qwen/Qwen3-8B"]
    anew = commits(machine.lock())
    assert not set(anew.values()) & set(commits(before).values())


def test_a_kernel_that_moved_is_updated_by_its_old_name(machine: Machine, hub: HubServer) -> None:
    """What a kernel's old place sends on to stays too, though that place has news; its old name moves the kernel."""
    old, new = "test-org/moved-attention", "test-org/torch-attention"
    machine.edit("kernels-community/flash-attn2@v2", f"{old}@v1")
    before = machine.lock()
    hub.commit(new, {"NEWS.md": "news\n"}, "v1", kind="kernel")
    hub.commit(old, {"kernel-status.toml": 'kind = "redirect"\ndestination = "test-org/none"\n'}, "v1", kind="kernel")
    assert machine.lock(before) == before
    with pytest.raises(ResolveError) as caught:
        machine.lock(before, new)
    assert "test-org/none" in caught.value.problems[0].message
    target = f'kind = "redirect"\ndestination = "{new}"\nrevision = "v1"\n'
    hub.commit(old, {"kernel-status.toml": target}, "v1", kind="kernel")
    for name in (old, new):
        after = machine.lock(before, name)
        assert commits(after) == {**commits(before), new: hub.sha(new, "v1", kind="kernel")} != commits(before)


def test_a_revision_that_changes_in_the_recipe(machine: Machine, hub: HubServer) -> None:
    """Another revision in the recipe is resolved anew; what it does not touch stays."""
    before = machine.lock()
    hub.commit("Qwen/Qwen3-8B", {"NEWS.md": "news\n"}, kind="model")
    machine.edit(
        "dataset:\n  repo: trl-lib/Capybara             # 16 thousand chats\n  revision: main",
        "dataset:\n  repo: trl-lib/Capybara\n  revision: v0.1",
    )
    after = commits(machine.lock(before))
    assert after["trl-lib/Capybara"] == hub.sha("trl-lib/Capybara", "v0.1", kind="dataset")
    assert after["Qwen/Qwen3-8B"] == commits(before)["Qwen/Qwen3-8B"]


def test_another_target_keeps_the_commits(machine: Machine, hub: HubServer) -> None:
    """From CUDA 12.9 to 12.8 model, data and kernels stay at their commits; packages and base are the target's."""
    before = machine.lock()
    hub.commit("Qwen/Qwen3-8B", {"NEWS.md": "news\n"}, kind="model")
    machine.edit('cuda: "12.9"', 'cuda: "12.8"')
    after = machine.lock(before)
    assert commits(after) == commits(before)
    assert after.base.name == "kitbuild/base-cuda128"
    assert {wheel.name: wheel.version for wheel in after.wheels}["torch"] == "2.10.0"
    assert pins_of(before, frozenset(), target="cuda128").versions == {}


def test_the_base_stays(machine: Machine, store: Store) -> None:
    """A new default base does not enter an existing lock; `--update base` takes it."""
    before = machine.lock()
    new = made.add(store, "kitbuild/base-cuda129", mark="new")
    bases.remember_name(store, new, definition=definition(load_target("cuda129")))
    assert machine.lock(before).base == before.base
    assert machine.lock(before, "base").base == new != before.base


def test_variants_follow_torch(machine: Machine, index: PackageIndex) -> None:
    """A torch whose CUDA is older than the base's gets the kernels of its own CUDA: that is what loads them."""
    publish(index, "torch", "2.8.0+cu128", tag=LINUX, requires=TORCH["2.8.0"])
    machine.edit("image:\n", 'image:\n  packages: {torch: "2.8.0+cu128"}\n')
    lock = machine.lock()
    assert lock.base.name == "kitbuild/base-cuda129"
    assert lock.kernels[0].variant == "torch28-cxx11-cu128-x86_64-linux"


@pytest.mark.parametrize(
    ("versions", "cuda", "told"),
    [
        ({"torch": "2.8.0+cu129"}, "12.9", "12.9"),
        ({"torch": "2.8.0+cu128", "nvidia-cuda-runtime-cu12": "12.6.77"}, "12.9", "12.8"),
        ({"torch": "2.8.0", "nvidia-cuda-runtime-cu12": "12.8.90"}, "12.9", "12.8"),
        ({"torch": "2.11.0", "nvidia-cuda-runtime": "13.0.48"}, "12.9", "13.0"),
        ({"torch": "2.8.0"}, "12.9", "12.9"),
        ({"torch": "2.13.0+cpu"}, "12.9", None),
        ({"torch": "2.13.0+cpu"}, None, None),
    ],
)
def test_the_cuda_of_torch(versions: dict[str, str], cuda: str | None, told: str | None) -> None:
    """Its local version tells, else the runtime package that it brings, else the target."""
    wheels = tuple(
        LockedWheel(name=name, version=version, file="x.whl", size=1, sha256="0" * 64, index="pypi")
        for name, version in versions.items()
    )
    system = system_of(recipes.read(RECIPE).recipe, wheels, architecture="amd64", cuda=cuda)
    assert (system.cuda, system.machine, system.gpu_archs) == (told, "x86_64", ("9.0",))


def test_the_broken_version_first(machine: Machine, hub: HubServer, index: PackageIndex) -> None:
    """The grouped-query advisory needs the model's configuration, and is told before packages, base or kernels."""
    machine.edit("flash-attn2@v2", "flash-attn2@v3")
    hub.requests.clear()
    index.seen.clear()
    with pytest.raises(RecipeError) as caught:
        machine.lock()
    assert [problem.key for problem in caught.value.problems] == ["KIT-2026-001"]
    assert index.seen == []
    assert not [request.path for request in hub.requests if "kernel" in request.path]


def test_the_broken_version_by_its_commit(machine: Machine, hub: HubServer) -> None:
    """A commit of the broken version is found out by the build's own metadata."""
    sha = hub.sha("kernels-community/flash-attn2", "v3", kind="kernel")
    machine.edit("flash-attn2@v2", f"flash-attn2@{sha}")
    with pytest.raises(RecipeError) as caught:
        machine.lock()
    assert [problem.key for problem in caught.value.problems] == ["KIT-2026-001"]


def test_a_model_that_is_gone(machine: Machine, hub: HubServer) -> None:
    """A repository that was deleted is exit 4, also where an earlier lock has its commit."""
    before = machine.lock()
    hub.delete_repo("Qwen/Qwen3-8B")
    with pytest.raises(ResolveError, match=r"^model Qwen/Qwen3-8B does not exist on the Hub, or is private$"):
        machine.lock(before)


def test_a_renamed_model(machine: Machine, hub: HubServer) -> None:
    """A repository that was renamed is locked under the name that it has today, stays there, and moves by either name."""
    hub.rename("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base")
    before = machine.lock()
    assert before.model.weights is not None
    assert before.model.weights.repo == "Qwen/Qwen3-8B-Base"
    hub.commit("Qwen/Qwen3-8B-Base", {"NEWS.md": "news\n"})
    assert machine.lock(before) == before
    assert machine.lock(before, "Qwen/Qwen3-8B") != before


def test_a_private_model(machine: Machine, environ: dict[str, str], tmp_path: Path) -> None:
    """With HF_TOKEN a private model is locked like any other; the token is in no byte of the lock and no file."""
    machine.edit("repo: Qwen/Qwen3-8B", "repo: test-org/private-model")
    with pytest.raises(ResolveError, match=r"^model test-org/private-model does not exist on the Hub, or is private$"):
        machine.lock()
    machine.environ = {**environ, "HF_TOKEN": READER_TOKEN}
    lock = machine.lock()
    assert lock.model.weights is not None
    assert lock.model.weights.repo == "test-org/private-model"
    assert READER_TOKEN.encode() not in lock.to_bytes()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and READER_TOKEN.encode() in path.read_bytes()]


def test_an_implied_version(machine: Machine) -> None:
    """A kernel without a revision is refused as it is read: the version that it means moves between releases."""
    machine.edit("flash-attn2@v2", "flash-attn2")
    with pytest.raises(RecipeError) as caught:
        recipes.read(machine.path)
    assert [problem.key for problem in caught.value.problems] == ["kernels.attention"]
    assert "names no revision" in caught.value.problems[0].message


def test_an_index_of_the_recipe_is_a_name(machine: Machine, index: PackageIndex) -> None:
    """The lock keeps the name of the recipe's index, for the wheels and for itself, and no address."""
    machine.edit("image:\n", f'image:\n  indexes:\n    corp: "{index.url}"\n')
    lock = machine.lock()
    assert lock.recipe["image"]["indexes"] == ["corp"]
    assert {wheel.index for wheel in lock.wheels} >= {"corp"}
    for address in (index.url, "127.0.0.1", "://"):
        assert address.encode() not in lock.to_bytes()
