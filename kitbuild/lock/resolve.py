"""Step 2: turn a recipe into exact revisions. With `store`, the only host code that uses the network.

`resolve` reads top to bottom: model first, since it tells with the tested versions whether a combination is known to
be bad, before a base is made and packages are resolved; then base, wheels, data, kernels, defaults.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from kitbuild.base.find import find
from kitbuild.base.targets import load_target
from kitbuild.lock.arguments import resolve_arguments
from kitbuild.lock.defaults import DECLARING, read_defaults
from kitbuild.lock.files import maker
from kitbuild.lock.hub import Hub
from kitbuild.lock.kernel_variants import System
from kitbuild.lock.kernels import lock_kernels
from kitbuild.lock.launcher import launch
from kitbuild.lock.models import LOCK_VERSION, Defaults, Lock, LockedModel, LockedWheel, MetAdvisory, PackageSet
from kitbuild.lock.pins import pins_of
from kitbuild.lock.pylock import given_pylock
from kitbuild.lock.requirements import expected_versions, refuse_advisories, requirements
from kitbuild.lock.torch_builds import cuda_of_local, cuda_of_runtime
from kitbuild.lock.trees import Trees
from kitbuild.lock.wheel_places import fetch_wheels
from kitbuild.lock.wheels import given_wheels, resolve_wheels

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import docker
    from packaging.pylock import Pylock

    from kitbuild.base.models import LockedBase
    from kitbuild.base.targets import Target
    from kitbuild.progress import Progress
    from kitbuild.recipe import LoadedRecipe
    from kitbuild.recipe.models import Recipe
    from kitbuild.store import Store

MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


def resolve(
    loaded: LoadedRecipe,
    *,
    store: Store,
    environ: Mapping[str, str],
    progress: Progress,
    client: Callable[[], docker.DockerClient],
    previous: Lock | None = None,
    update: frozenset[str] = frozenset(),
) -> Lock:
    """Resolve a recipe. With `previous`, what it fixed stays, but for what `update` names."""
    recipe = loaded.recipe
    target = load_target(recipe.image.target)
    pins = pins_of(previous, update, target=target.target)
    file, given = given_pylock(loaded)
    tested = expected_versions(recipe, target, given=given)
    refuse_advisories(recipe, versions=tested, model_config=recipe.model.config)
    hub: list[Hub] = []

    def the_hub() -> Hub:
        if not hub:
            hub.append(Hub(environ, pins=pins.commits))
        return hub[0]

    trees = Trees(folder=loaded.path.parent, hub=the_hub, store=store, progress=progress)
    model = trees.model(recipe)
    model_config = _model_config(model, store)
    refuse_advisories(recipe, versions=tested, model_config=model_config)

    base = find(
        recipe.image.base,
        target=target.target,
        store=store,
        environ=environ,
        client_factory=client,
        progress=progress,
        digest=pins.base,
    )
    wheels = _wheels(
        recipe,
        target,
        base,
        given,
        preferences=pins.versions,
        store=store,
        environ=environ,
        progress=progress,
    )
    versions = {wheel.name: wheel.version for wheel in wheels}
    refuse_advisories(recipe, versions=versions, model_config=model_config)
    datasets = tuple(trees.dataset(item, key=f"dataset.{index}") for index, item in enumerate(recipe.dataset))
    evaluate = trees.dataset(recipe.evaluate.dataset, key="evaluate.dataset") if recipe.evaluate else None
    system = system_of(recipe, wheels, architecture=base.architecture, cuda=target.cuda)
    kernels = (
        lock_kernels(recipe, system=system, wheels=wheels, hub=the_hub(), store=store, progress=progress)
        if recipe.kernels.attention_reference or recipe.kernels.layers
        else ()
    )
    met = refuse_advisories(recipe, versions=versions, model_config=model_config, kernels=kernels)
    sources = tuple(wheel for wheel in wheels if wheel.name in DECLARING)
    fetch_wheels(sources, store=store, environ=environ, progress=progress)
    declared = read_defaults(wheels, store)
    arguments, device_dependent = resolve_arguments(recipe, declared)
    return Lock(
        version=LOCK_VERSION,
        name=recipe.name,
        recipe_sha256=loaded.sha256,
        kitbuild=maker(),
        target=target.target,
        package_set=PackageSet(target=target.target, sha256=target.sha256, pylock=file),
        base=base,
        wheels=wheels,
        model=model,
        datasets=datasets,
        evaluate=evaluate,
        kernels=kernels,
        defaults=Defaults(declared=declared, arguments=arguments, device_dependent=device_dependent),
        launch=launch(recipe),
        recipe=as_locked(recipe),
        advisories=tuple(MetAdvisory(id=item.id, severity=item.severity) for item in met),
    )


def _wheels(
    recipe: Recipe,
    target: Target,
    base: LockedBase,
    given: Pylock | None,
    *,
    preferences: Mapping[str, str],
    store: Store,
    environ: Mapping[str, str],
    progress: Progress,
) -> tuple[LockedWheel, ...]:
    """The tested set, resolved, or the wheels of a pylock.toml in its place."""
    asked = partial(
        resolve_wheels if given is None else given_wheels,
        python=base.python,
        glibc=base.glibc,
        architecture=base.architecture,
        torch_backend=target.torch_backend,
        indexes=recipe.image.indexes,
        store=store,
        environ=environ,
        progress=progress,
    )
    if given is None:
        return asked(requirements(recipe, target), preferences=preferences)
    return asked(given)


def system_of(recipe: Recipe, wheels: tuple[LockedWheel, ...], *, architecture: str, cuda: str | None) -> System:
    """What a kernel must fit. `cuda` is the target's."""
    versions = {wheel.name: wheel.version for wheel in wheels}
    torch = versions.get("torch", "0")
    # Variants follow torch.version.cuda, not the base: a cu128 torch on a 12.9 base is "cu128".
    told = cuda and not torch.endswith("+cpu") and (cuda_of_local(torch) or cuda_of_runtime(versions) or cuda)
    return System(cuda=told or None, torch=torch, machine=MACHINES[architecture], gpu_archs=recipe.image.gpu_archs)


def _model_config(model: LockedModel, store: Store) -> Mapping[str, Any] | None:
    if model.config is not None:
        return model.config
    files = {file.path: file.sha256 for file in model.weights.files} if model.weights else {}
    if "config.json" not in files:
        return None
    loaded = json.loads(store.path(files["config.json"]).read_bytes())
    return loaded if isinstance(loaded, dict) else None


def as_locked(recipe: Recipe) -> dict[str, Any]:
    """The recipe as parsed, less its name and less the addresses of its indexes: a mirror serves as well."""
    fields = recipe.model_dump(mode="json", by_alias=True, exclude={"name"})
    fields["image"]["indexes"] = sorted(recipe.image.indexes)
    return fields
