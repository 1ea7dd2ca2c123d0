"""A lock's wheels as pylock.toml for other tools, and such a file in place of the tested set."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from packaging.pylock import Pylock
from uv import find_uv_bin

from kitbuild import recipe as recipes
from kitbuild.base import bases
from kitbuild.base.build import definition
from kitbuild.base.targets import load_target
from kitbuild.errors import LockError, RecipeError, ResolveError, UsageError
from kitbuild.flow import building, locking
from kitbuild.flow.context import Context
from kitbuild.lock.files import check_current, read_lock
from kitbuild.lock.pylock import read_pylock
from kitbuild.progress import Silent
from kitbuild.store import Store
from tests.base import made
from tests.headline.stand_ins import LINUX, TORCH, publish, publish_packages
from tests.hub.content import qwen3_files
from tests.lock.package_index import serving

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kitbuild.lock.models import Lock
    from tests.lock.package_index import PackageIndex

ROOT = Path(__file__).parents[2]
NOTHING: frozenset[str] = frozenset()


@pytest.fixture(scope="module")
def index() -> Iterator[PackageIndex]:
    with serving() as running:
        publish_packages(running, targets=("cuda129",))
        yield running


class Machine:
    """A store, a folder with a recipe in it, and an index."""

    def __init__(self, folder: Path, index_url: str) -> None:
        folder.mkdir()
        self.path = folder / "recipe.yaml"
        self.environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "KITBUILD_HOME": str(folder / "store"),
            "UV_DEFAULT_INDEX": index_url,
            "UV_CACHE_DIR": str(folder / "uv"),
            "UV_NO_CONFIG": "1",
            "UV_HTTP_RETRIES": "0",
            "PIP_CONFIG_FILE": os.devnull,
            "DOCKER_HOST": "tcp://127.0.0.1:1",
        }
        store = Store.open(self.environ)
        base = made.add(store, "kitbuild/base-cuda129", mark="cuda129")
        bases.remember_name(store, base, definition=definition(load_target("cuda129")))
        self.context = Context(environ=self.environ, store=store, progress=Silent())
        (folder / "model").mkdir()
        for name, data in qwen3_files(seed=1, tied=True).items():
            (folder / "model" / name).write_bytes(data)
        (folder / "rows.jsonl").write_text('{"text": "a"}\n')
        self.write()

    def write(self, **changes: Any) -> None:
        fields = {
            "kitbuild": 1,
            "name": "recipe",
            "model": {"path": "model"},
            "dataset": {"path": "rows.jsonl"},
            "image": {"cuda": "12.9"},
            "batch": {"global": 1, "micro": 1},
        }
        self.path.write_text(json.dumps(fields | changes))

    def lock(self, **options: Any) -> Lock:
        given: dict[str, Any] = {"only_check": False, "update": NOTHING, "upgrade": False, "diff": None}
        locking.lock(self.context, self.path, **given | options)
        found = read_lock(self.path)
        assert found is not None
        return found

    def folder(self, name: str) -> Path:
        return self.path.parent / name


@pytest.fixture
def machine(tmp_path: Path, index: PackageIndex) -> Machine:
    return Machine(tmp_path / "one", index.url)


def digests(lock: Lock) -> dict[str, tuple[str, str]]:
    return {wheel.name: (wheel.version, wheel.sha256) for wheel in lock.wheels}


def test_written_and_taken(machine: Machine, tmp_path: Path) -> None:
    """The file follows the standard and has every wheel; a recipe that names it gets the same ones, without an index."""
    lock = machine.lock(pylock=machine.folder("pylock.toml"))
    text = machine.folder("pylock.toml").read_text()
    written = Pylock.from_dict(tomllib.loads(text))
    assert {package.name: str(package.version) for package in written.packages} == {
        wheel.name: wheel.version for wheel in lock.wheels
    }
    assert written.tool == {"kitbuild": {"lock-sha256": lock.sha256}}
    again = machine.lock(pylock=machine.folder("pylock.again.toml"))
    assert again == lock
    assert machine.folder("pylock.again.toml").read_text() == text

    other = Machine(tmp_path / "two", "http://127.0.0.1:1/simple")
    other.folder("pylock.toml").write_text(text)
    other.write(image={"cuda": "12.9", "pylock": "pylock.toml"})
    found = other.lock()
    assert digests(found) == digests(lock)
    assert found.package_set.pylock is not None
    assert (found.package_set.pylock.path, found.package_set.pylock.size) == ("pylock.toml", len(text.encode()))
    assert found.wheels == lock.wheels
    other.folder("pylock.toml").write_text(re.sub("(?m)^tool = .*$", "", text))
    indexes = {wheel.name: wheel.index for wheel in other.lock().wheels}
    assert (indexes["torch"], indexes["trl"]) == ("pytorch-cu129", "pylock")
    assert "127.0.0.1" not in found.to_bytes().decode()


def test_another_machine_finds_its_wheels(machine: Machine, tmp_path: Path) -> None:
    """With an empty store, the lock and the file beside it are enough; a file that was edited is not asked."""
    lock = machine.lock(pylock=machine.folder("pylock.toml"))
    machine.write(image={"cuda": "12.9", "pylock": "pylock.toml"})
    lock = machine.lock()
    other = Machine(tmp_path / "two", "http://127.0.0.1:1/simple")
    for name in ("recipe.yaml", "recipe.lock.json", "pylock.toml"):
        other.folder(name).write_bytes(machine.folder(name).read_bytes())
    loaded = recipes.read(other.path)
    building.fetch_all(other.context, lock, loaded, base=False)
    assert all(other.context.store.has(wheel.sha256) for wheel in lock.wheels)

    third = Machine(tmp_path / "three", "http://127.0.0.1:1/simple")
    third.folder("pylock.toml").write_text(machine.folder("pylock.toml").read_text() + "# edited\n")
    third.write(image={"cuda": "12.9", "pylock": "pylock.toml"})
    with pytest.raises(ResolveError, match=r"cannot be reached"):
        building.fetch_all(third.context, lock, recipes.read(third.path), base=False)


def test_a_file_that_changed(machine: Machine) -> None:
    """An edited pylock.toml makes the lock stale, like any local file."""
    machine.lock(pylock=machine.folder("pylock.toml"))
    machine.write(image={"cuda": "12.9", "pylock": "pylock.toml"})
    lock = machine.lock()
    with machine.folder("pylock.toml").open("a") as stream:
        stream.write("# edited\n")
    with pytest.raises(LockError) as caught:
        check_current(recipes.read(machine.path), lock)
    assert [(problem.key, problem.message) for problem in caught.value.problems] == [
        ("image.pylock", "is not the locked file any more")
    ]


def test_what_no_index_has_is_laid_beside_it(machine: Machine, tmp_path: Path) -> None:
    """A wheel from a folder of this machine goes with the file, by a path that is relative to it."""
    folder = tmp_path / "links"
    with serving() as links:
        publish(links, "torch", "2.8.0+cu129", tag=LINUX, requires=(*TORCH["2.8.0+cu129"], "only-here"))
        publish(links, "only-here", "1.0")
        links.save(folder)
    machine.environ["UV_FIND_LINKS"] = str(folder)
    lock = machine.lock(pylock=machine.folder("out/pylock.toml"))
    assert {wheel.index for wheel in lock.wheels if wheel.name == "only-here"} == {"find-links"}
    entries = {
        item["name"]: item["wheels"][0]
        for item in tomllib.loads(machine.folder("out/pylock.toml").read_text())["packages"]
    }
    assert entries["only-here"]["path"] == "only_here-1.0-py3-none-any.whl"
    assert "url" not in entries["only-here"]
    (machine.path.parent / "out").rename(machine.path.parent / "moved")
    (url,) = [
        wheel.url
        for package in read_pylock(machine.folder("moved/pylock.toml")).packages
        if package.name == "only-here"
        for wheel in package.wheels or ()
    ]
    assert url == machine.folder("moved/only_here-1.0-py3-none-any.whl").as_uri()
    assert machine.folder("moved/only_here-1.0-py3-none-any.whl").is_file()


def test_another_tool_takes_it(tmp_path: Path, index: PackageIndex) -> None:
    """uv installs from the file, checking each digest."""
    machine = Machine(tmp_path / "one", index.url)
    lock = machine.lock(pylock=machine.folder("pylock.toml"))
    target = tmp_path / "installed"
    command = [find_uv_bin(), "pip", "install", "--python", sys.executable, "--target", str(target), "--no-deps"]
    command += ["--python-platform", "x86_64-manylinux_2_28", "--python-version", "3.11"]
    done = subprocess.run(
        [*command, "-r", str(machine.folder("pylock.toml"))],
        env={**machine.environ, "UV_PREVIEW": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in target.glob("*.dist-info")} >= {
        f"{wheel.name.replace('-', '_')}-{wheel.version}.dist-info" for wheel in lock.wheels
    }


def test_by_the_command_line(machine: Machine) -> None:
    """`--pylock` and `--diff` together: the file is there, and what moved is told on stdout."""
    machine.lock()
    old = machine.folder("old.json")
    machine.folder("recipe.lock.json").rename(old)
    machine.write(seed=7)
    command = [sys.executable, "-m", "kitbuild", "lock", str(machine.path), "--diff", str(old), "--pylock"]
    done = subprocess.run(
        [*command, str(machine.folder("pylock.toml"))],
        env={**machine.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{machine.folder('recipe.lock.json')} written, ")
    assert lines[1:-1] == [
        "arguments in force:",
        "  data_seed 42 (kitbuild) → 7 (kitbuild)",
        "  seed 42 (kitbuild) → 7 (kitbuild)",
        "recipe:",
        "  seed 42 → 7",
    ]
    assert lines[-1] == f"wrote {machine.folder('pylock.toml')}"
    assert machine.folder("pylock.toml").is_file()


HEAD = 'lock-version = "1.0"\ncreated-by = "t"\n'
ENTRY = '[[packages]]\nname = "{}"\nversion = "{}"\nwheels = [{{url = "https://h/{}", hashes = {{{}}}}}]\n'
SHA = 'sha256 = "' + "0" * 64 + '"'


def entries(versions: Mapping[str, str], hashes: str = SHA, tag: str = "py3-none-any") -> str:
    return HEAD + "".join(
        ENTRY.format(name, version, f"{name.replace('-', '_')}-{version}-{tag}.whl", hashes)
        for name, version in versions.items()
    )


def whole(more: str = "", **versions: str) -> str:
    """The tested set, with other versions and entries."""
    tested = {name.replace("_", "-"): version for name, version in load_target("cuda129").packages.items()}
    return entries(tested | {name.replace("_", "-"): version for name, version in versions.items()}) + more


def entry(name: str, version: str, tag: str) -> str:
    return entries({name: version}, tag=tag).removeprefix(HEAD)


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("x = ", ["is not TOML: Invalid value (at end of document)"]),
        ("x = " + "[" * 100_000, ["is not TOML: maximum recursion depth exceeded"]),
        ("#" * ((16 << 20) + 1), ["is larger than 16 MiB"]),
        (
            'lock-version = "2.0"\ncreated-by = "t"\npackages = []\n',
            ["does not follow the standard: pylock version 2.0"],
        ),
        ('lock-version = "1.0"\npackages = []\n', ["does not follow the standard: Missing required value"]),
        (entries({"a": "1.0", "b": "1.0"}, "md5 = 'x'"), ["a-1.0-py3-none-any.whl has no sha256", "b-1.0-py3-none"]),
        (
            entries({"a": "1.0"}).replace("https://", "https://me:secret@"),
            ["a-1.0-py3-none-any.whl: its address has a u"],
        ),
        (HEAD + '[[packages]]\nname = "a"\ndirectory = {path = "x"}\n', ["a is no release with wheels"]),
    ],
)
def test_files_that_cannot_be_used(machine: Machine, text: str, messages: list[str]) -> None:
    """Exit 2 with everything that is wrong with it, before anything is asked for, at `check` too."""
    machine.folder("pylock.toml").write_text(text)
    machine.write(image={"cuda": "12.9", "pylock": "pylock.toml"})
    with pytest.raises(RecipeError) as caught:
        locking.check(machine.path, machine.environ)
    assert [problem.key for problem in caught.value.problems] == ["image.pylock"] * len(messages)
    for problem, message in zip(caught.value.problems, messages, strict=True):
        assert problem.message.startswith(message)
        assert "secret" not in str(problem)
    with pytest.raises(RecipeError):
        machine.lock()


def test_what_the_recipe_needs_and_the_file_lacks(machine: Machine) -> None:
    """Every package that is missing, and each version that is another than the recipe's own, at once."""
    machine.folder("pylock.toml").write_text(entries({"torch": "2.8.0+cu129", "trl": "1.14.2", "extra": "1"}))
    machine.write(
        image={"cuda": "12.9", "pylock": "pylock.toml", "packages": {"trl": "1.13.0", "torch": "2.8.0+cu129"}},
        lora={"r": 4},
    )
    with pytest.raises(RecipeError) as caught:
        machine.lock()
    told = {problem.key: problem.message for problem in caught.value.problems}
    assert told["image.packages.trl"] == "trl is 1.13.0 here, and 1.14.2 in pylock.toml"
    assert "image.packages.torch" not in told
    missing = [problem.message for problem in caught.value.problems if problem.key == "image.pylock"]
    assert "pylock.toml has no transformers, which this recipe needs" in missing
    assert len(missing) == len(load_target("cuda129").packages) - 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (whole(entry("alien", "1", "cp311-cp311-win_amd64")), r"^no wheel for the target: .*alien"),
        (
            whole(
                '[[packages]]\nname = "raw"\nversion = "1.0"\n'
                f'sdist = {{url = "https://h/raw-1.0.tar.gz", hashes = {{{SHA}}}}}\n'
            ),
            r"^the pylock file has raw 1.0 without a wheel for the target$",
        ),
        (whole(torch="2.11.0", nvidia_cuda_runtime="13.0.48"), r"built for CUDA 13.0, the target is CUDA 12.9$"),
        (
            whole().replace(HEAD, HEAD + 'requires-python = ">=3.13"\n'),
            r"^no wheel for the target: python_full_version",
        ),
    ],
)
def test_files_of_another_target(machine: Machine, text: str, message: str) -> None:
    """What does not fit the target's Python, system or CUDA is exit 4."""
    machine.folder("pylock.toml").write_text(text)
    machine.write(image={"cuda": "12.9", "pylock": "pylock.toml"})
    with pytest.raises(ResolveError, match=message):
        machine.lock()


def test_advisories_see_its_versions(machine: Machine) -> None:
    """A known-bad combination in the file is refused by `check`."""
    machine.folder("pylock.toml").write_text(whole(trl="1.15.0"))
    machine.write(image={"cuda": "12.9", "pylock": "pylock.toml"}, liger={"fused_linear_cross_entropy": True})
    with pytest.raises(RecipeError) as caught:
        locking.check(machine.path, machine.environ)
    assert [problem.key for problem in caught.value.problems] == ["KIT-2026-002"]


def test_a_file_that_is_not_there(machine: Machine) -> None:
    """It is a local input like any other: exit 2 at its key."""
    machine.write(image={"cuda": "12.9", "pylock": "gone.toml"})
    with pytest.raises(RecipeError) as caught:
        locking.check(machine.path, machine.environ)
    assert [problem.key for problem in caught.value.problems] == ["image.pylock"]


@pytest.mark.parametrize("name", ["lock.toml", "pylock.a.b.toml"])
def test_a_name_that_no_tool_knows(machine: Machine, name: str) -> None:
    """The standard fixes how such a file is called: another name is exit 2 before anything is resolved."""
    with pytest.raises(UsageError, match=f"^{name} cannot name a pylock file$"):
        machine.lock(pylock=machine.folder(name))
    assert not machine.folder("recipe.lock.json").exists()
