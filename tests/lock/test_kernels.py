"""Hub kernels are locked for the target: variant, files, dependencies, trust; every problem before a GPU is used."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.errors import ResolveError, VerificationError
from kitbuild.lock.hub import Hub
from kitbuild.lock.kernel_metadata import parse_metadata
from kitbuild.lock.kernel_variants import System, choose_variant
from kitbuild.lock.kernels import lock_kernels
from kitbuild.lock.models import LockedKernel, LockedWheel, Moved
from kitbuild.recipe.models import Recipe
from tests.base.made import Notes
from tests.hub import kernel_repos
from tests.hub.server import HubServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kitbuild.store import Store

CUDA129 = System(cuda="12.9", torch="2.8.0+cu129", machine="x86_64", gpu_archs=("9.0",))
CUDA128 = System(cuda="12.8", torch="2.10.0", machine="x86_64", gpu_archs=("9.0",))
CPU = System(cuda=None, torch="2.13.0+cpu", machine="x86_64")
FLASH = "kernels-community/flash-attn2"
LIGER = "kernels-community/liger-kernels"


def recipe(attention: str = "sdpa", *, layers: dict[str, str] | None = None, **policy: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "kitbuild": 1,
            "name": "test",
            "model": {"repo": "Qwen/Qwen3-8B"},
            "dataset": ({"repo": "trl-lib/Capybara"},),
            "kernels": {"attention": attention, "layers": layers or {}},
            "image": {"cuda": "12.9"},
            "batch": {"global": 1, "micro": 1},
            "policy": policy,
        }
    )


def wheel(name: str, version: str) -> LockedWheel:
    return LockedWheel(name=name, version=version, file="x.whl", size=1, sha256="0" * 64, index="pypi")


KERNELS = (wheel("kernels", "0.17.2"),)


class Locker:
    """Locks kernels against one Hub; what was noted is kept."""

    def __init__(self, environ: dict[str, str], store: Store) -> None:
        self.environ, self.store, self.notes = environ, store, Notes()

    def __call__(
        self, asked: Recipe, system: System = CUDA129, wheels: tuple[LockedWheel, ...] = KERNELS
    ) -> tuple[LockedKernel, ...]:
        return lock_kernels(
            asked, system=system, wheels=wheels, hub=Hub(self.environ), store=self.store, progress=self.notes
        )

    def one(self, attention: str, system: System = CPU) -> LockedKernel:
        (kernel,) = self(recipe(attention), system)
        return kernel


@pytest.fixture
def lock(hub_environ: dict[str, str], store: Store) -> Locker:
    return Locker(hub_environ, store)


@pytest.fixture
def own_hub(tmp_path: Path) -> Iterator[HubServer]:
    """An empty Hub that a test fills and changes."""
    with HubServer(tmp_path / "own") as running:
        running.add_organization("org", trusted_kernel_publisher=True)
        yield running


@pytest.fixture
def own(own_hub: HubServer, hub_environ: dict[str, str], store: Store) -> Locker:
    return Locker({**hub_environ, "HF_ENDPOINT": own_hub.url}, store)


def publish(hub: HubServer, files: dict[str, bytes], repo: str = "org/kernel") -> str:
    if not [name for _, name in hub.state.repos if name == repo]:
        hub.create_repo(repo, "kernel")
    return hub.commit(repo, files, "v1", kind="kernel")


def with_metadata(files: dict[str, bytes], **changes: Any) -> dict[str, bytes]:
    """The same files with fields of metadata.json changed; None removes one."""
    (path,) = [name for name in files if name.endswith("metadata.json")]
    fields = {**json.loads(files[path]), **changes}
    return {**files, path: json.dumps({key: value for key, value in fields.items() if value is not None}).encode()}


@pytest.mark.parametrize(
    ("system", "names", "chosen"),
    [
        (CUDA129, kernel_repos.ATTENTION_VARIANTS, "torch28-cxx11-cu129-x86_64-linux"),
        (CUDA128, kernel_repos.ATTENTION_VARIANTS, "torch210-cxx11-cu128-x86_64-linux"),
        (
            CUDA128,
            kernel_repos.ATTENTION_VARIANTS + kernel_repos.STABLE_VARIANTS,
            "torch-stable-abi210-cu128-x86_64-linux",
        ),
        (
            CUDA129,
            ("torch28-cxx11-cu126-x86_64-linux", "torch28-cxx11-cu128-x86_64-linux"),
            "torch28-cxx11-cu128-x86_64-linux",
        ),
        (CUDA129, ("torch28-cxx11-cu118-x86_64-linux", "torch28-cxx11-cu130-x86_64-linux"), None),
        (CUDA129, ("torch29-cxx11-cu129-x86_64-linux",), None),
        (CUDA129, ("torch28-cxx11-cu129-aarch64-linux",), None),
        (CUDA129, ("torch-cpu", "torch-cuda"), "torch-cuda"),
        (CUDA129, ("torch-universal",), "torch-universal"),
        (CPU, ("torch-cpu", "torch-cuda"), "torch-cpu"),
        (CPU, ("torch28-cxx11-cu129-x86_64-linux",), None),
        (CUDA129, ("__pycache__", "notes"), None),
        (CUDA129, (), None),
    ],
)
def test_the_variant_for_a_target(system: System, names: tuple[str, ...], chosen: str | None) -> None:
    """What `kernels` would load on the target, whatever this machine is; each other one has a reason."""
    found, rejected = choose_variant(list(names), system)
    assert found == chosen
    assert {item.variant for item in rejected} == set(names) - {chosen}
    assert all(item.reason for item in rejected)


def test_host_settings_do_not_matter(lock: Locker, monkeypatch: pytest.MonkeyPatch) -> None:
    """LOCAL_KERNELS and a telemetry switch, which break or redirect `kernels` itself, change nothing here."""
    before = lock.one(f"{FLASH}@v2", CUDA129)
    monkeypatch.setenv("LOCAL_KERNELS", f"{FLASH}=/tmp")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    lock.environ |= {"LOCAL_KERNELS": f"{FLASH}=/tmp", "HF_HUB_DISABLE_TELEMETRY": "1"}
    assert lock.one(f"{FLASH}@v2", CUDA129) == before


def test_only_the_variant_is_locked(hub: HubServer, lock: Locker) -> None:
    """Files of the one variant, its binary by the Hub's digest without fetching it, and the commit of the branch."""
    kernel = lock.one(f"{FLASH}@v2", CUDA129)
    assert kernel.commit == hub.sha(FLASH, "v2", kind="kernel")
    assert {file.path.split("/")[1] for file in kernel.files} == {"torch28-cxx11-cu129-x86_64-linux"}
    (shared,) = [file for file in kernel.files if file.path.endswith(".so")]
    assert not lock.store.has(shared.sha256)
    assert kernel.kernel_version == 2
    assert (kernel.publisher, kernel.trusted, kernel.signature) == ("kernels-community", True, "absent")
    assert f"attention: {FLASH} @ {kernel.commit[:12]} (kernels.attention v2)" in lock.notes.lines[-1]


def test_a_revision_may_be_a_commit_or_tag(hub: HubServer, lock: Locker) -> None:
    """A tag and the 40 digits of a commit lock the same as the branch."""
    sha = hub.sha(FLASH, "v2", kind="kernel")
    assert {lock.one(f"{FLASH}@{name}").commit for name in ("v2", "release-2", sha)} == {sha}


def test_layers_of_one_repository(lock: Locker) -> None:
    """Two layers of one repository and revision are one kernel; another revision is another."""
    asked = recipe(
        layers={
            "RMSNorm": f"{LIGER}@v3:LigerRMSNorm",
            "SwiGLU": f"{LIGER}@v3:LigerSwiGLU",
            "Rope": f"{LIGER}@v1:LigerRope",
        }
    )
    found = lock(asked)
    assert [
        (kernel.role, kernel.revision, kernel.layers) for kernel in sorted(found, key=lambda item: item.revision)
    ] == [
        ("layers", "v1", {"Rope": "LigerRope"}),
        ("layers", "v3", {"RMSNorm": "LigerRMSNorm", "SwiGLU": "LigerSwiGLU"}),
    ]


def test_one_commit_by_two_names(hub: HubServer, lock: Locker) -> None:
    """A branch and the commit that it names now are one repository's files, and neither's layers are lost."""
    sha = hub.sha(LIGER, "v3", kind="kernel")
    found = lock(recipe(layers={"RMSNorm": f"{LIGER}@v3:LigerRMSNorm", "SwiGLU": f"{LIGER}@{sha}:LigerSwiGLU"}))
    assert {kernel.commit for kernel in found} == {sha}
    assert {name for kernel in found for name in kernel.layers} == {"RMSNorm", "SwiGLU"}


def test_a_redirect_is_followed(hub: HubServer, lock: Locker) -> None:
    """kernel-status.toml, which `kernels` does not follow when it loads: the lock has the destination and the way."""
    kernel = lock.one("test-org/moved-attention@v1")
    old = hub.sha("test-org/moved-attention", "v1", kind="kernel")
    assert kernel.redirects == (Moved(repo="test-org/moved-attention", revision="v1", commit=old),)
    assert (kernel.repo, kernel.revision) == ("test-org/torch-attention", "v1")
    assert kernel.commit == hub.sha("test-org/torch-attention", "v1", kind="kernel")
    assert "kernel test-org/moved-attention moved to test-org/torch-attention" in lock.notes.lines


def test_a_kernel_that_was_renamed(own_hub: HubServer, own: Locker) -> None:
    """It is locked under its name of today, with the recipe's; a kernel that others need by its old name is refused."""
    publish(own_hub, needing("org/old"), "org/top")
    commit = publish(own_hub, needing(), "org/old")
    own_hub.rename("org/old", "org/new", kind="kernel")
    kernel = own.one("org/old@v1")
    assert (kernel.repo, kernel.commit) == ("org/new", commit)
    assert kernel.redirects == (Moved(repo="org/old", revision="v1", commit=commit),)
    with pytest.raises(ResolveError) as caught:
        own(recipe("org/top@v1"), CPU)
    assert caught.value.problems[0].message == (
        "org/old@v1 moved to org/new, which the kernel that needs it does not know"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('kind = "redirect"\ndestination = "org/kernel"\nrevision = "v1"\n', "redirects more than 5 times"),
        ("kind = \n", "org/kernel@v1: kernel-status.toml cannot be read: "),
    ],
)
def test_a_redirect_that_leads_nowhere(own_hub: HubServer, own: Locker, text: str, message: str) -> None:
    """A circle and a file that cannot be read are exit 4."""
    publish(own_hub, {"kernel-status.toml": text.encode()})
    with pytest.raises(ResolveError) as caught:
        own.one("org/kernel@v1")
    assert message in caught.value.problems[0].message


def test_a_redirect_to_a_stranger(own_hub: HubServer, own: Locker) -> None:
    """The trust that counts is that of whom the code comes from, not of whom the recipe names."""
    publish(own_hub, {"kernel-status.toml": b'kind = "redirect"\ndestination = "other/kernel"\nrevision = "v1"\n'})
    publish(own_hub, kernel_repos.variant_files("k", "torch-universal", {"__init__.py": b""}), "other/kernel")
    with pytest.raises(ResolveError) as caught:
        own.one("org/kernel@v1")
    assert caught.value.problems[0].message == "other/kernel@v1: other is not a trusted kernel publisher"


def test_dependencies(hub: HubServer, lock: Locker) -> None:
    """What a kernel needs is locked by commit too, with the role of a dependency."""
    found = {kernel.role: kernel for kernel in lock(recipe("test-org/dependent-attention@v1"), CPU)}
    assert found["attention"].dependencies == ("test-org/torch-attention@v1",)
    assert found["dependency"].repo == "test-org/torch-attention"
    assert found["dependency"].commit == hub.sha("test-org/torch-attention", "v1", kind="kernel")


def needing(*others: str) -> dict[str, bytes]:
    depends = tuple({"repo-id": other, "version": 1} for other in others)
    return kernel_repos.variant_files("k", "torch-universal", {"__init__.py": b""}, kernel_depends=depends)


def test_dependencies_that_are_shared(own_hub: HubServer, own: Locker) -> None:
    """What two kernels need is locked once."""
    for name, needs in (
        ("first", ("org/left", "org/right")),
        ("left", ("org/last",)),
        ("right", ("org/last",)),
        ("last", ()),
    ):
        publish(own_hub, needing(*needs), f"org/{name}")
    assert [kernel.repo for kernel in own(recipe("org/first@v1"), CPU)] == [
        "org/first",
        "org/last",
        "org/left",
        "org/right",
    ]


def test_dependencies_that_cannot_be_had(own_hub: HubServer, own: Locker) -> None:
    """Kernels that need each other, one that is missing and one that moved are exit 4; each is under who asks for it."""
    publish(own_hub, needing("org/second"), "org/first")
    publish(own_hub, needing("org/first"), "org/second")
    publish(
        own_hub, {"kernel-status.toml": b'kind = "redirect"\ndestination = "org/first"\nrevision = "v1"\n'}, "org/moved"
    )
    publish(own_hub, needing("org/none", "org/moved"), "org/third")
    with pytest.raises(ResolveError) as caught:
        own(recipe("org/first@v1"), CPU)
    assert [problem.message for problem in caught.value.problems] == [
        "kernels need each other in a circle: org/first@v1 → org/second@v1 → org/first@v1"
    ]
    with pytest.raises(ResolveError) as caught:
        own(recipe("org/third@v1"), CPU)
    assert [(problem.key, problem.message) for problem in caught.value.problems] == [
        ("needed by org/third", "kernel org/none does not exist on the Hub, or is private"),
        ("needed by org/third", "org/moved@v1 moved to org/first, which the kernel that needs it does not know"),
    ]


def test_publishers(lock: Locker) -> None:
    """A publisher that the Hub does not trust is exit 4; the recipe may trust it, or the one repository."""
    with pytest.raises(ResolveError) as caught:
        lock.one("stranger/flash-attn2@v1")
    (problem,) = caught.value.problems
    assert problem.message == "stranger/flash-attn2@v1: stranger is not a trusted kernel publisher"
    assert problem.hint == "if you trust it, add it: policy: {allow_publishers: [stranger]}"
    for name in ("stranger", "stranger/flash-attn2"):
        (kernel,) = lock(recipe("stranger/flash-attn2@v1", allow_publishers=(name,)), CPU)
        assert kernel.trusted is False


def test_signatures_that_are_asked_for(lock: Locker, own_hub: HubServer, own: Locker) -> None:
    """With require_signatures an unsigned kernel is exit 4, and something that is no signature is exit 7."""
    with pytest.raises(ResolveError) as caught:
        lock(recipe(f"{FLASH}@v2", require_signatures=True))
    assert [problem.message for problem in caught.value.problems] == [f"{FLASH}@v2 is not signed"]
    files = kernel_repos.variant_files("k", "torch-universal", {"__init__.py": b""})
    publish(own_hub, {**files, "build/torch-universal/metadata.json.sigstore": b"{}"})
    assert own.one("org/kernel@v1").signature == "present"
    with pytest.raises(
        VerificationError, match=r"^org/kernel \(torch-universal\): metadata\.json\.sigstore is no signature"
    ):
        own(recipe("org/kernel@v1", require_signatures=True), CPU)


def test_the_state_of_a_signature(own_hub: HubServer, own: Locker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock says whether a build is unsigned, signed, or signed and checked; it is checked where that is asked for."""
    files = kernel_repos.variant_files("k", "torch-universal", {"__init__.py": b""})
    publish(own_hub, files)
    assert own.one("org/kernel@v1").signature == "absent"
    signed = {**files, "build/torch-universal/metadata.json.sigstore": b"{}"}
    publish(own_hub, signed)
    assert own.one("org/kernel@v1").signature == "present"
    seen = []
    monkeypatch.setattr("kitbuild.lock.kernels.check_signature", lambda *given, name: seen.append((*given, name)))
    (kernel,) = own(recipe("org/kernel@v1", require_signatures=True), CPU)
    assert kernel.signature == "verified"
    assert seen == [(signed["build/torch-universal/metadata.json"], b"{}", "org/kernel (torch-universal)")]


def test_a_build_that_was_changed(lock: Locker) -> None:
    """Files that are not those of the build's own digest are exit 7 and named: nothing checks it when it is loaded."""
    with pytest.raises(VerificationError) as caught:
        lock.one("test-org/tampered-attention@v1")
    assert caught.value.message == (
        "test-org/tampered-attention (torch-universal) does not match its own metadata: flash_attn.py"
    )


def test_files_that_come_or_go(own_hub: HubServer, own: Locker) -> None:
    """A file that the digest does not know, and one that is missing, count as changed; byte code does not."""
    files = kernel_repos.variant_files("k", "torch-universal", {"__init__.py": b"", "a.py": b"1\n"})
    extra = {"build/torch-universal/extra.py": b"", "build/torch-universal/__pycache__/a.cpython-311.pyc": b"x"}
    publish(own_hub, {**files, **extra})
    with pytest.raises(VerificationError, match=r"does not match its own metadata: extra\.py$"):
        own.one("org/kernel@v1")
    publish(own_hub, {"build/torch-universal/extra.py": None, "build/torch-universal/a.py": None})  # type: ignore[dict-item]
    with pytest.raises(VerificationError, match=r"does not match its own metadata: a\.py$"):
        own.one("org/kernel@v1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel-depends": ["x"]}, "kernel-depends.0: "),
        ({"backend": "cuda"}, "backend: "),
        ({"digest": {"algorithm": "sha256"}}, "digest.files: "),
        ({"kernels-minver": "new"}, "kernels-minver: "),
        ({"digest": {"algorithm": "sha512", "files": {}}}, "its digest is sha512"),
    ],
)
def test_metadata_of_another_shape(own_hub: HubServer, own: Locker, changes: dict[str, Any], message: str) -> None:
    """Metadata that `kernels` could not have written is exit 4 and says where, never a crash."""
    files = kernel_repos.variant_files("k", "torch-universal", {"__init__.py": b""})
    publish(own_hub, with_metadata(files, **changes))
    with pytest.raises(ResolveError) as caught:
        own.one("org/kernel@v1")
    assert message in caught.value.problems[0].message


def test_metadata_that_says_little() -> None:
    """Everything but the file itself may be missing or null."""
    assert parse_metadata(b"{}", name="k").kernel_depends == ()
    assert parse_metadata(b'{"backend": null, "python-depends": null, "version": null}', name="k").backend.type == "cpu"
    with pytest.raises(ResolveError, match=r"^k: metadata\.json cannot be read: "):
        parse_metadata(b"[]", name="k")


def test_no_metadata(own_hub: HubServer, own: Locker) -> None:
    """A build without metadata cannot be verified: exit 4."""
    publish(own_hub, {"build/torch-universal/__init__.py": b""})
    with pytest.raises(ResolveError) as caught:
        own.one("org/kernel@v1")
    assert caught.value.problems[0].message == "org/kernel@v1: build/torch-universal/metadata.json is missing"


def test_a_digest_that_is_missing_or_odd(own_hub: HubServer, own: Locker) -> None:
    """Without a digest the Hub's own stand; one that is no base64 fits no file."""
    files = kernel_repos.variant_files("k", "torch-universal", {"__init__.py": b""})
    publish(own_hub, with_metadata(files, digest=None))
    assert own.one("org/kernel@v1").metadata_digest is None
    publish(own_hub, with_metadata(files, digest={"algorithm": "sha256", "files": {"__init__.py": "!"}}))
    with pytest.raises(VerificationError, match=r"metadata: __init__\.py$"):
        own.one("org/kernel@v1")


def test_the_digest_is_kept(lock: Locker) -> None:
    """The metadata's digest goes into the lock as it is, sorted."""
    kernel = lock.one("test-org/torch-attention@v1")
    told = json.loads(str(kernel.metadata_digest))
    assert told["algorithm"] == "sha256"
    folder = f"build/{kernel.variant}/"
    for file in kernel.files:
        if not file.path.endswith("metadata.json"):
            assert base64.b64decode(told["files"][file.path.removeprefix(folder)]).hex() == file.sha256
    about = next(file for file in kernel.files if file.path.endswith("metadata.json"))
    assert (
        kernel.metadata_sha256 == about.sha256 == hashlib.sha256(lock.store.path(about.sha256).read_bytes()).hexdigest()
    )


def test_every_problem_at_once(lock: Locker) -> None:
    """No build for the target, a missing repository and a missing architecture are told together, by recipe key."""
    asked = recipe("test-org/other-cuda@v1", layers={"A": "test-org/none@v1:L", "B": f"{FLASH}@v2:L"})
    system = System(cuda="12.9", torch="2.8.0", machine="x86_64", gpu_archs=("7.5", "9.0", "12.0"))
    with pytest.raises(ResolveError) as caught:
        lock(asked, system)
    found = {str(problem.key): problem for problem in caught.value.problems}
    assert sorted(found) == ["kernels.attention", "kernels.layers.A", "kernels.layers.B"]
    assert found["kernels.attention"].message.endswith(" has no build for torch 2.8.0, CUDA 12.9, x86_64")
    assert "torch210-cxx11-cu130-aarch64-linux, torch28-cxx11-cu118-x86_64-linux" in str(
        found["kernels.attention"].hint
    )
    refused = [
        problem.message.rpartition(" ")[2] for problem in caught.value.problems if problem.key == "kernels.layers.B"
    ]
    assert refused == ["7.5", "12.0"]


@pytest.mark.parametrize(
    ("arch", "built_for", "fits"),
    [
        ("9.0", ["8.0", "9.0"], True),
        ("8.9", ["8.0"], True),
        ("8.0", ["8.6"], False),
        ("9.0", ["8.0"], False),
        ("12.0", ["9.0+PTX"], True),
        ("7.5", ["8.0+PTX"], False),
        ("9.0", ["9.0a"], True),
        ("10.3", ["10.0a"], False),
        ("10.3", ["10.0"], True),
        ("10.3", ["10.0f"], True),
        ("12.0", ["10.0f"], False),
        ("9.0", ["odd"], True),
    ],
)
def test_architectures(own_hub: HubServer, own: Locker, arch: str, built_for: list[str], fits: bool) -> None:  # noqa: FBT001 - a column of the table
    """Machine code runs on its own major from its minor up, `a` code on its own alone, PTX on all that is newer."""
    files = kernel_repos.variant_files("k", "torch-cuda", {"__init__.py": b""})
    publish(own_hub, with_metadata(files, backend={"type": "cuda", "archs": built_for}))
    system = System(cuda="12.9", torch="2.8.0", machine="x86_64", gpu_archs=(arch,))
    if fits:
        assert own(recipe("org/kernel@v1"), system)
    else:
        with pytest.raises(ResolveError) as caught:
            own(recipe("org/kernel@v1"), system)
        told = f"is built for GPU architectures {', '.join(built_for)}, not {arch}"
        assert caught.value.problems[0].message == f"org/kernel@v1 (torch-cuda) {told}"


def test_packages_that_a_kernel_needs(own_hub: HubServer, own: Locker) -> None:
    """A package that it imports and a newer `kernels` than the lock's are exit 4, with the key to add."""
    files = kernel_repos.variant_files("k", "torch-cuda", {"__init__.py": b""}, python_depends=("einops",))
    publish(own_hub, with_metadata(files, **{"kernels-minver": "0.18.0"}))
    with pytest.raises(ResolveError) as caught:
        own(recipe("org/kernel@v1"))
    assert [problem.message for problem in caught.value.problems] == [
        "org/kernel@v1 needs kernels ≥ 0.18.0, the lock has 0.17.2",
        "org/kernel@v1 needs the Python package einops, which the lock does not have",
    ]
    publish(own_hub, files)
    assert own(recipe("org/kernel@v1"), CUDA129, (*KERNELS, wheel("einops", "0.8.0")))
    publish(own_hub, with_metadata(files, **{"python-depends": ["einops", "nki", "nonsense"]}))
    with pytest.raises(ResolveError) as caught:
        own(recipe("org/kernel@v1"), CUDA129, (*KERNELS, wheel("einops", "0.8.0")))
    assert [problem.message for problem in caught.value.problems] == [
        f"org/kernel@v1 needs {name}, which kernels does not know: it would refuse to load"
        for name in ("nki", "nonsense")
    ]
