"""Rendering a job: which image it names, and what is refused before anything is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.errors import ImageError, LockError, RecipeError, UsageError
from kitbuild.flow import building, rendering
from kitbuild.flow.context import Context
from kitbuild.flow.rendering import RenderOptions
from kitbuild.image.known import known_image, remember_image
from kitbuild.image.models import Image
from kitbuild.lock.files import lock_path, write_lock
from kitbuild.progress import Silent
from kitbuild.recipe import read
from tests.image.kit import make_lock, new_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from kitbuild.lock.models import Lock

REPOSITORY = Path(__file__).resolve().parents[2]
GIVEN = f"sha256:{'9' * 64}"
ENGINE_ID = f"sha256:{'e' * 64}"


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(
        environ={"DOCKER_HOST": "unix:///nonexistent"}, store=new_store(tmp_path / "store"), progress=Silent()
    )


@pytest.fixture
def recipe(tmp_path: Path, context: Context) -> Path:
    """A recipe with a current lock."""
    shutil.copytree(REPOSITORY / "recipes/data", tmp_path / "data")
    path = Path(shutil.copy(REPOSITORY / "recipes/tiny-cpu.yaml", tmp_path / "tiny.yaml"))
    write_lock(path, make_lock(context.store, recipe_sha256=read(path).sha256))
    return path


def locked(context: Context, recipe: Path) -> Lock:
    return make_lock(context.store, recipe_sha256=read(recipe).sha256)


def made(content: bytes = b"manifest") -> Image:
    return Image(config=b"config", manifest=content, layers=(), tag="tiny:1")


def options(**changes: Any) -> RenderOptions:
    given: dict[str, Any] = {"image": None, "inputs": None, "out": None, "output": None}
    return RenderOptions(**(given | changes))


def named_by(context: Context, recipe: Path, system: str, **changes: Any) -> str | None:
    """The image that the job of a system names."""
    given = options(**changes)
    if system == "compose":
        result = rendering.render_for_compose(context, recipe, given)
    elif system == "k8s":
        result = rendering.render_for_k8s(context, recipe, given, kind="job")
    else:
        result = rendering.render_for_slurm(context, recipe, given, container=system)
    image = result.fields["image"]
    assert image is None or image.split("@")[-1] in result.fields["text"]
    return None if image is None else str(image)


SYSTEMS = ("pyxis", "apptainer", "k8s", "compose")


@pytest.mark.parametrize("system", SYSTEMS)
def test_never_built(system: str, context: Context, recipe: Path) -> None:
    """Exit 5, with the line that builds and pushes, and what to give instead."""
    with pytest.raises(ImageError) as raised:
        named_by(context, recipe, system)
    assert raised.value.message == f"no image of {lock_path(recipe)} was built here"
    assert raised.value.hint == f"kitbuild image {recipe} --push REGISTRY/NAME:TAG, or give --image NAME@sha256:…"


@pytest.mark.parametrize("system", SYSTEMS)
def test_built_and_not_pushed(system: str, context: Context, recipe: Path) -> None:
    """This machine's Compose takes the engine's own image; other machines need a registry."""
    remember_image(context.store, locked(context, recipe), made(), engine_id=ENGINE_ID, pushed=None)
    if system == "compose":
        assert named_by(context, recipe, system) == ENGINE_ID
        return
    with pytest.raises(ImageError, match="was built here, but never pushed to a registry"):
        named_by(context, recipe, system)


@pytest.mark.parametrize("system", SYSTEMS)
def test_pushed(system: str, context: Context, recipe: Path) -> None:
    """The last place that this image was pushed to, by the manifest's digest and not by the tag."""
    lock, image = locked(context, recipe), made()
    for place in ("first.example/a:1", "second.example/b:2"):
        remember_image(context.store, lock, image, engine_id=ENGINE_ID, pushed=place)
    assert named_by(context, recipe, system) == f"second.example/b@{image.manifest_digest}"


@pytest.mark.parametrize("system", SYSTEMS)
def test_given_image(system: str, context: Context, recipe: Path) -> None:
    """--image with a digest is taken as it is; with a tag, the digest is this lock's, where it was built here."""
    assert named_by(context, recipe, system, image=f"r.example/a:1@{GIVEN}") == f"r.example/a@{GIVEN}"
    with pytest.raises(ImageError, match=r"--image r\.example/a:1 has no digest, and this lock's image was not built"):
        named_by(context, recipe, system, image="r.example/a:1")
    remember_image(context.store, locked(context, recipe), made(), engine_id=None, pushed=None)
    assert named_by(context, recipe, system, image="r.example/a:1") == f"r.example/a@{made().manifest_digest}"


def test_another_image_of_the_lock_forgets_where_the_first_went(context: Context, recipe: Path) -> None:
    """A digest that was not pushed there is not named there; the same one is remembered with all its places."""
    lock = locked(context, recipe)
    remember_image(context.store, lock, made(), engine_id=ENGINE_ID, pushed="a.example/a:1")
    remember_image(context.store, lock, made(), engine_id=None, pushed=None)
    known = known_image(context.store, lock)
    assert known is not None
    assert (known.engine_id, known.pushed) == (ENGINE_ID, ("a.example/a:1",))
    remember_image(context.store, lock, made(b"other"), engine_id=None, pushed=None)
    known = known_image(context.store, lock)
    assert known is not None
    assert (known.engine_id, known.pushed) == (None, ())


def test_file_for_slurm(context: Context, recipe: Path) -> None:
    """A squashfs or SIF file needs no registry; without a container there is no image at all."""
    assert named_by(context, recipe, "pyxis", image="/shared/a b.sqsh") == "/shared/a b.sqsh"
    assert named_by(context, recipe, "apptainer", image="/shared/a.sif") == "/shared/a.sif"
    assert named_by(context, recipe, "none") is None
    with pytest.raises(UsageError, match="--image does not go with --container none"):
        named_by(context, recipe, "none", image=f"a@{GIVEN}")


def test_lock_is_never_made(context: Context, recipe: Path) -> None:
    """Missing or stale, it is exit 3, and stays as it is."""
    recipe.write_text(recipe.read_text() + "\n# edited\n")
    kept = lock_path(recipe).read_bytes()
    with pytest.raises(LockError, match="is stale"):
        named_by(context, recipe, "none")
    assert lock_path(recipe).read_bytes() == kept
    lock_path(recipe).unlink()
    with pytest.raises(LockError, match="does not exist"):
        named_by(context, recipe, "none")
    assert not lock_path(recipe).exists()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("slurm", "--container docker is not known"),
        ("k8s", "--kind pod is not known"),
    ],
)
def test_unknown_ways(call: str, message: str, context: Context, recipe: Path) -> None:
    """Exit 2, with those that there are."""
    wrong: dict[str, Callable[[], object]] = {
        "slurm": lambda: rendering.render_for_slurm(context, recipe, options(), container="docker"),
        "k8s": lambda: rendering.render_for_k8s(context, recipe, options(), kind="pod"),
    }
    with pytest.raises(UsageError, match=message) as raised:
        wrong[call]()
    assert (raised.value.hint or "").startswith("one of ")


def test_output(context: Context, recipe: Path, tmp_path: Path) -> None:
    """To a file or to stdout, the same text; a place that cannot be written is exit 2."""
    shown = rendering.render_for_slurm(context, recipe, options(), container="none")
    target = tmp_path / "job.sh"
    written = rendering.render_for_slurm(context, recipe, options(output=target), container="none")
    assert target.read_text(encoding="utf-8") == shown.text() == shown.fields["text"] == written.fields["text"]
    assert (shown.fields["path"], written.fields["path"], written.text()) == (None, str(target), f"wrote {target}")
    assert json.loads(json.dumps(dict(shown.as_json()))).keys() == {"system", "kind", "image", "path", "text"}
    with pytest.raises(UsageError, match="cannot be written: "):
        rendering.render_for_slurm(context, recipe, options(output=Path("/proc/none/x")), container="none")


def test_recipe_is_read_strictly(context: Context, recipe: Path) -> None:
    """A recipe that is none is located as everywhere."""
    recipe.write_text("kitbuild: 1\nnmae: x\n")
    with pytest.raises(RecipeError) as raised:
        named_by(context, recipe, "none")
    assert raised.value.exit_code == 2


def test_inputs_as_a_directory(context: Context, recipe: Path, tmp_path: Path) -> None:
    """Model and data are copied where a job looks for them; again, nothing is written; every file is the locked one."""
    folder = tmp_path / "inputs"
    told = building.fetch(context, recipe, bundle=None, source=None, inputs=folder)
    lock = locked(context, recipe)
    wanted = {f"data/{index}/{file.path}": file for index, data in enumerate(lock.datasets) for file in data.tree.files}
    assert wanted
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    assert wanted.keys() <= found.keys()
    for name, file in wanted.items():
        assert found[name].read_bytes() == context.store.path(file.sha256).read_bytes()
        assert found[name].stat().st_nlink == 1
    assert told.fields["inputs"] == str(folder)
    before = {path: path.stat().st_mtime_ns for path in found.values()}
    building.fetch(context, recipe, bundle=None, source=None, inputs=folder)
    assert before == {path: path.stat().st_mtime_ns for path in found.values()}


def test_inputs_that_cannot_be_written(context: Context, recipe: Path) -> None:
    """Exit 2 that names the place."""
    with pytest.raises(UsageError, match=r"^/proc/none/.* cannot be written: "):
        building.fetch(context, recipe, bundle=None, source=None, inputs=Path("/proc/none"))
