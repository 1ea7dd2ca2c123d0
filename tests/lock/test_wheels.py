"""Wheels resolved for the target from indexes made here; no other network is touched."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from kitbuild.base.targets import load_known, load_target
from kitbuild.errors import ResolveError, VerificationError
from kitbuild.lock import sdists
from kitbuild.lock.uv import Sources
from kitbuild.lock.wheel_places import fetch_wheels, locate_wheels
from kitbuild.lock.wheels import resolve_wheels
from kitbuild.progress import Silent
from kitbuild.store import Store
from tests.headline import stand_ins
from tests.lock.package_index import LINUX, PackageIndex, serving
from tests.lock.tls import authority

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from kitbuild.lock.models import Lock, LockedWheel


class Notes(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, message: str) -> None:
        self.lines.append(message)


@pytest.fixture
def index() -> Iterator[PackageIndex]:
    with serving() as state:
        yield state


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open({"KITBUILD_HOME": str(tmp_path / "store")})


@pytest.fixture
def environ(index: PackageIndex, tmp_path: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
        "UV_DEFAULT_INDEX": index.url,
        "UV_CACHE_DIR": str(tmp_path / "uv-cache"),
        "UV_HTTP_RETRIES": "0",
        "UV_NO_CONFIG": "1",
    }


def resolve(
    requirements: Mapping[str, str],
    store: Store,
    environ: Mapping[str, str],
    *,
    torch_backend: str | None = None,
    indexes: Mapping[str, str] | None = None,
    preferences: Mapping[str, str] | None = None,
    progress: Silent | None = None,
    glibc: str = "2.36",
) -> tuple[LockedWheel, ...]:
    return resolve_wheels(
        requirements,
        python="3.11.2",
        glibc=glibc,
        architecture="amd64",
        torch_backend=torch_backend,
        indexes=indexes or {},
        preferences=preferences,
        store=store,
        environ=environ,
        progress=progress or Silent(),
    )


def lock_of() -> Lock:
    base = SimpleNamespace(python="3.11.2", glibc="2.36", architecture="amd64")
    return cast("Lock", SimpleNamespace(base=base, recipe={}))


def versions(wheels: tuple[LockedWheel, ...]) -> dict[str, str]:
    return {wheel.name: wheel.version for wheel in wheels}


def test_a_set_is_resolved_with_what_it_needs(index: PackageIndex, store: Store, environ: dict[str, str]) -> None:
    """Names are normal, sorted, with file, size and digest; the newest that fits is taken."""
    digest = index.wheel("low-level", "1.2")
    index.wheel("low-level", "2.0")
    index.wheel("top-thing", "1.0", requires=("low-level<2",))
    low, top = resolve({"Top_Thing": "1.0"}, store, environ)
    assert (low.name, low.version, low.file, low.sha256, low.index, low.built) == (
        "low-level",
        "1.2",
        "low_level-1.2-py3-none-any.whl",
        digest,
        "pypi",
        None,
    )
    assert low.size == len(index.files["low-level"][low.file])
    assert top.name == "top-thing"


def test_markers_hold_for_the_target_and_not_for_the_host(
    index: PackageIndex, store: Store, environ: dict[str, str]
) -> None:
    """What another system, machine or Python needs is not locked."""
    for name in ("on-linux", "on-windows", "on-arm", "on-old", "on-full"):
        index.wheel(name, "1.0")
    index.wheel(
        "top",
        "1.0",
        requires=(
            "on-linux; sys_platform == 'linux'",
            "on-windows; sys_platform == 'win32'",
            "on-arm; platform_machine == 'aarch64'",
            "on-old; python_version < '3.11'",
            "on-full; python_full_version >= '3.11.2'",
        ),
    )
    assert list(versions(resolve({"top": "1.0"}, store, environ))) == ["on-full", "on-linux", "top"]


def test_the_best_wheel_for_the_target_is_taken(index: PackageIndex, store: Store, environ: dict[str, str]) -> None:
    """Among wheels of a version: this Python, this machine, the newest glibc that is not too new."""
    for tag in (
        "py3-none-any",
        "cp311-cp311-manylinux_2_17_x86_64",
        "cp311-cp311-manylinux_2_28_x86_64",
        "cp311-cp311-manylinux_2_39_x86_64",
        "cp311-cp311-manylinux_2_28_aarch64",
        "cp312-cp312-manylinux_2_28_x86_64",
        "cp311-cp311-win_amd64",
        "cp311-cp311-macosx_11_0_arm64",
        "cp39-abi3-manylinux_2_31_x86_64",
    ):
        index.wheel("fast", "1.0", tag=tag)
    assert resolve({"fast": "1.0"}, store, environ)[0].file == "fast-1.0-cp311-cp311-manylinux_2_28_x86_64.whl"
    newer = resolve({"fast": "1.0"}, store, environ, glibc="2.39")
    assert newer[0].file == "fast-1.0-cp311-cp311-manylinux_2_39_x86_64.whl"


@pytest.mark.parametrize(
    "tag", ["cp311-cp311-win_amd64", "cp312-cp312-manylinux_2_28_x86_64", "cp311-cp311-manylinux_2_39_x86_64"]
)
def test_no_wheel_for_the_target_is_exit_4(
    index: PackageIndex, store: Store, environ: dict[str, str], tag: str
) -> None:
    """Wheels of other platforms only: the message names the package."""
    index.wheel("alien", "1.0", tag=tag)
    with pytest.raises(ResolveError, match=r"^the packages do not fit together: .*alien.*"):
        resolve({"alien": "1.0"}, store, environ)


def test_source_only_is_exit_4(index: PackageIndex, store: Store, environ: dict[str, str]) -> None:
    """Nothing is built unless kitbuild knows how to build it repeatably."""
    index.publish("raw", "raw-1.0.tar.gz", b"never read")
    with pytest.raises(ResolveError, match=r"^the packages do not fit together: .*raw.*"):
        resolve({"raw": "1.0"}, store, environ)


def test_a_conflict_is_told_in_uvs_words(index: PackageIndex, store: Store, environ: dict[str, str]) -> None:
    """The reason names both sides, and no address."""
    index.wheel("low", "1.0")
    index.wheel("top", "1.0", requires=("low>=2",))
    with pytest.raises(ResolveError) as caught:
        resolve({"top": "1.0", "low": "1.0"}, store, environ)
    assert caught.value.exit_code == 4
    assert caught.value.message.startswith("the packages do not fit together: Because ")
    assert "top depend on low>=2 and you require low==1.0" in caught.value.message
    assert caught.value.message.endswith("there is no solution.")
    assert "http" not in caught.value.message


def test_an_unknown_package_is_exit_4(store: Store, environ: dict[str, str]) -> None:
    """A name that no index has."""
    with pytest.raises(ResolveError, match=r"nosuch.* was not found in the package registry"):
        resolve({"nosuch": "1.0"}, store, environ)


def test_no_index_at_all_is_exit_4(store: Store, environ: dict[str, str]) -> None:
    """A refused connection names the host and the way out."""
    with serving() as gone:
        environ["UV_DEFAULT_INDEX"] = gone.url
    with pytest.raises(ResolveError) as caught:
        resolve({"top": "1.0"}, store, environ)
    assert caught.value.message.startswith("the package index 127.0.0.1 cannot be reached: ")
    assert caught.value.hint is not None
    assert "UV_DEFAULT_INDEX" in caught.value.hint


def test_a_yanked_pin_is_noted(index: PackageIndex, store: Store, environ: dict[str, str]) -> None:
    """An exact version that was withdrawn is taken, aloud; without a pin it is passed over."""
    index.wheel("bad", "1.0")
    index.wheel("bad", "2.0")
    index.yanked["bad-2.0-py3-none-any.whl"] = "loses data"
    notes = Notes()
    assert versions(resolve({"bad": "2.0"}, store, environ, progress=notes)) == {"bad": "2.0"}
    assert any("yanked" in line and "loses data" in line for line in notes.lines)
    assert versions(resolve({"bad": ">=1"}, store, environ)) == {"bad": "1.0"}


def test_versions_of_an_earlier_lock_stay(index: PackageIndex, store: Store, environ: dict[str, str]) -> None:
    """A newer upstream moves nothing that still fits."""
    for version in ("1.0", "1.1", "2.0"):
        index.wheel("low", version)
    index.wheel("top", "1.0", requires=("low",))
    index.wheel("top", "2.0", requires=("low>1",))
    assert versions(resolve({"top": "1.0"}, store, environ))["low"] == "2.0"
    assert versions(resolve({"top": "1.0"}, store, environ, preferences={"low": "1.0"}))["low"] == "1.0"
    assert versions(resolve({"top": "2.0"}, store, environ, preferences={"low": "1.0"}))["low"] == "2.0"


def test_one_package_moves_and_nothing_else(index: PackageIndex, store: Store, environ: dict[str, str]) -> None:
    """Without the preference of one name, that one is the newest, what it then needs follows, and the rest stays."""
    for name in ("left", "right", "needed"):
        index.wheel(name, "1.0", requires=("needed<2",) if name == "left" else ())
    index.wheel("top", "1.0", requires=("left", "right", "needed"))
    before = versions(resolve({"top": "1.0"}, store, environ))
    for name in ("left", "right", "needed"):
        index.wheel(name, "2.0", requires=("needed>=2",) if name == "left" else ())
    environ["UV_CACHE_DIR"] += "-anew"
    assert versions(resolve({"top": "1.0"}, store, environ, preferences=before)) == before
    for name, moved in (("right", {"right"}), ("left", {"left", "needed"})):
        kept = {other: version for other, version in before.items() if other != name}
        after = versions(resolve({"top": "1.0"}, store, environ, preferences=kept))
        assert {other for other in after if after[other] != before[other]} == moved


def test_the_cpu_build_of_torch_comes_from_pips_find_links(
    index: PackageIndex, store: Store, environ: dict[str, str], tmp_path: Path
) -> None:
    """The plain wheel of the index is not taken for a CPU target, also where the version has no local part."""
    index.wheel("torch", "2.13.0", tag=LINUX)
    links = PackageIndex()
    digest = links.wheel("torch", "2.13.0+cpu", tag=LINUX)
    links.save(tmp_path / "links")
    environ["PIP_FIND_LINKS"] = str(tmp_path / "links")
    for version in ("2.13.0+cpu", "2.13.0"):
        (torch,) = resolve({"torch": version}, store, environ, torch_backend="cpu")
        assert (torch.version, torch.sha256, torch.index) == ("2.13.0+cpu", digest, "pytorch-cpu")
        assert torch.file == "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"


def test_cuda_builds_of_torch_follow_the_target(index: PackageIndex, store: Store, environ: dict[str, str]) -> None:
    """Of one version with several builds, the target's is taken and its index named after it."""
    for local in ("+cu126", "+cu128", "+cu129", "+cpu", ""):
        index.wheel("torch", f"2.8.0{local}", tag=LINUX)
    for backend in ("cu128", "cu129"):
        (torch,) = resolve({"torch": "2.8.0"}, store, environ, torch_backend=backend)
        assert (torch.version, torch.index) == (f"2.8.0+{backend}", f"pytorch-{backend}")


def test_a_plain_torch_is_taken_where_its_cuda_is_the_targets(
    index: PackageIndex, store: Store, environ: dict[str, str]
) -> None:
    """The dependencies tell for which CUDA the plain wheel is."""
    index.wheel("nvidia-cuda-runtime-cu12", "12.8.90", tag=LINUX)
    index.wheel("torch", "2.10.0", tag=LINUX, requires=("nvidia-cuda-runtime-cu12==12.8.90",))
    found = resolve({"torch": "2.10.0"}, store, environ, torch_backend="cu128")
    assert versions(found)["torch"] == "2.10.0"
    assert {wheel.index for wheel in found} == {"pypi"}


def test_what_torch_cannot_mend_is_told_at_once(index: PackageIndex, store: Store, environ: dict[str, str]) -> None:
    """A reason that has nothing to do with torch ends the search before PyTorch's index is asked."""
    index.wheel("torch", "2.13.0+cpu", tag=LINUX)
    begun = time.monotonic()
    with pytest.raises(ResolveError, match="nosuch"):
        resolve({"torch": "2.13.0", "nosuch": "1"}, store, environ, torch_backend="cpu")
    assert time.monotonic() - begun < 10


def test_pips_extra_index_is_asked_only_for_what_the_main_one_lacks(
    index: PackageIndex, store: Store, environ: dict[str, str]
) -> None:
    """A lock does not depend on what else a machine knows, and a private package is found."""
    index.wheel("common", "1.0")
    with serving() as extra:
        extra.wheel("common", "9.0")
        extra.wheel("private", "1.0", requires=("common",))
        environ["PIP_EXTRA_INDEX_URL"] = extra.url
        assert versions(resolve({"common": ">=1"}, store, environ)) == {"common": "1.0"}
        assert extra.seen == []
        assert "private" in versions(resolve({"private": "1.0"}, store, environ))


def test_a_recipes_index_is_named_and_its_login_is_used(
    index: PackageIndex, store: Store, environ: dict[str, str]
) -> None:
    """The lock has the name of the index that a wheel comes from; the password goes with the download too."""
    index.wheel("common", "1.0")
    with serving() as own:
        own.login = "me:s3cret"
        digest = own.wheel("ours", "1.0", requires=("common",))
        indexes = {"corp": own.url.replace("//", "//me:s3cret@")}
        found = resolve({"ours": "1.0"}, store, environ, indexes=indexes)
        assert {wheel.name: wheel.index for wheel in found} == {"common": "pypi", "ours": "corp"}
        downloads = locate_wheels(found, lock=lock_of(), indexes=indexes, store=store, environ=environ)
        assert "s3cret" not in repr(found) + repr(downloads) + str(store.records("wheel-addresses"))
        fetch_wheels(found, store=store, environ=environ | {"UV_INDEX": f"corp={indexes['corp']}"}, progress=Silent())
        assert store.has(digest)


@pytest.mark.parametrize("old_numpy", [False, True])
def test_cuda129_from_an_index_of_the_recipe(
    index: PackageIndex,
    store: Store,
    environ: dict[str, str],
    tmp_path: Path,
    old_numpy: bool,  # noqa: FBT001 - a column
) -> None:
    """The tested set resolves with torch from a second index alone, though that one holds old versions of the rest."""
    target = load_target("cuda129")
    stand_ins.publish_packages(index, targets=("cuda129",))
    builds = index.files.pop("torch")
    index.wheel("numpy", "2.3.0")
    stand_ins.publish(index, "transformers", target.packages["transformers"], requires=("numpy>=2", "tokenizers"))
    with serving() as pytorch:
        pytorch.files["torch"] = builds
        if old_numpy:
            pytorch.wheel("numpy", "1.26.3")
        indexes = {"pytorch": pytorch.url}
        found = resolve(target.packages, store, environ, torch_backend=target.torch_backend, indexes=indexes)
        locked = {wheel.name: wheel for wheel in found}
        torch = locked["torch"]
        assert (torch.version, torch.index) == ("2.8.0+cu129", "pytorch-cu129")
        assert versions(found)["nvidia-cuda-runtime-cu12"] == "12.9.79"
        assert (locked["numpy"].version, locked["numpy"].index) == ("2.3.0", "pypi")
        assert all(versions(found)[name.replace("_", "-")] == version for name, version in target.packages.items())
        other = Store.open({"KITBUILD_HOME": str(tmp_path / "other")})
        downloads = locate_wheels(found, lock=lock_of(), indexes=indexes, store=other, environ=environ)
        assert {item.sha256 for item in downloads} == {wheel.sha256 for wheel in found}
        (torch_file,) = [item for item in downloads if item.sha256 == torch.sha256]
        assert torch_file.url.startswith(pytorch.url.removesuffix("/simple"))


def test_the_ca_that_pip_is_told_of(store: Store, environ: dict[str, str], tmp_path: Path) -> None:
    """An index behind a CA of its own, known to pip's settings alone, is asked and its wheels are fetched."""
    ca, tls = authority(tmp_path)
    with serving(tls=tls) as index:
        index.wheel("low", "1.0")
        settings = tmp_path / "pip.conf"
        settings.write_text(f"[global]\nindex-url = {index.url}\n")
        del environ["UV_DEFAULT_INDEX"]
        environ["PIP_CONFIG_FILE"] = str(settings)
        with pytest.raises(ResolveError, match=r"^the package index 127.0.0.1 cannot be reached"):
            resolve({"low": "1.0"}, store, environ)
        settings.write_text(f"[global]\nindex-url = {index.url}\ncert = {ca}\n")
        wheels = resolve({"low": "1.0"}, store, environ)
        fetch_wheels(wheels, store=store, environ=environ, progress=Silent())
    assert store.has(wheels[0].sha256)


def test_a_private_package_is_never_taken_from_another_index(
    index: PackageIndex, store: Store, environ: dict[str, str]
) -> None:
    """A name that the recipe's index has comes from there, though another index offers a higher version of it."""
    index.wheel("corp-tool", "99.0")
    with serving() as corp:
        corp.wheel("corp-tool", "1.0")
        found = resolve({"corp-tool": ">=1"}, store, environ, indexes={"corp": corp.url})
    assert [(wheel.version, wheel.index) for wheel in found] == [("1.0", "corp")]


def test_an_index_without_digests_gets_them_by_fetching(
    index: PackageIndex, store: Store, environ: dict[str, str]
) -> None:
    """The digest is of the bytes, whatever the index says."""
    index.hashes = False
    digest = index.wheel("bare", "1.0")
    (wheel,) = resolve({"bare": "1.0"}, store, environ)
    assert (wheel.sha256, wheel.size) == (digest, len(index.files["bare"][wheel.file]))


def test_wheels_are_fetched_once(index: PackageIndex, store: Store, environ: dict[str, str]) -> None:
    """After a fetch everything is in the store, and no address is asked for again."""
    digest = index.wheel("top", "1.0")
    found = resolve({"top": "1.0"}, store, environ)
    fetch_wheels(found, store=store, environ=environ, progress=Silent())
    assert store.has(digest)
    index.seen.clear()
    assert locate_wheels(found, lock=lock_of(), indexes={}, store=store, environ=environ) == []
    fetch_wheels(found, store=store, environ=environ, progress=Silent())
    assert index.seen == []


def test_wheels_of_a_lock_are_found_on_another_machine(
    index: PackageIndex, store: Store, environ: dict[str, str], tmp_path: Path
) -> None:
    """Without an address, the files are found by version and digest, also from a mirror."""
    index.wheel("top", "1.0", requires=("low",))
    index.wheel("low", "1.0")
    found = resolve({"top": "1.0"}, store, environ)
    other = Store.open({"KITBUILD_HOME": str(tmp_path / "other")})
    with serving() as mirror:
        mirror.files = index.files
        environ |= {"UV_DEFAULT_INDEX": mirror.url, "UV_CACHE_DIR": str(tmp_path / "cache")}
        downloads = locate_wheels(found, lock=lock_of(), indexes={}, store=other, environ=environ)
    assert [(item.name, item.sha256, item.size) for item in downloads] == [
        (wheel.file, wheel.sha256, wheel.size) for wheel in found
    ]
    assert all(str(mirror.port) in item.url for item in downloads)


def test_a_file_that_was_replaced_is_exit_4(
    index: PackageIndex, store: Store, environ: dict[str, str], tmp_path: Path
) -> None:
    """Same name and version, other bytes: named, and not taken; what is gone is named too, the rest is found."""
    index.wheel("moved", "1.0")
    index.wheel("gone", "1.0")
    index.wheel("there", "1.0")
    found = resolve({"moved": "1.0", "gone": "1.0", "there": "1.0"}, store, environ)
    index.wheel("moved", "1.0", files={"moved/other.py": "x = 1"})
    del index.files["gone"]
    other = Store.open({"KITBUILD_HOME": str(tmp_path / "other")})
    environ["UV_CACHE_DIR"] = str(tmp_path / "cache")
    with pytest.raises(ResolveError) as caught:
        locate_wheels(found, lock=lock_of(), indexes={}, store=other, environ=environ)
    assert caught.value.message == (
        "no package index offers gone-1.0-py3-none-any.whl, moved-1.0-py3-none-any.whl with the locked digest"
    )


PROGRAM = """
import os, sys
from kitbuild.lock.wheels import resolve_wheels
from kitbuild.progress import Silent
from kitbuild.store import Store
for wheel in resolve_wheels({"top": "1.0", "b": ">=1", "a": "*"}, python="3.11.2", glibc="2.36", architecture="amd64",
        torch_backend=None, indexes={}, store=Store.open(os.environ), environ=dict(os.environ), progress=Silent()):
    print(wheel.model_dump_json())
"""


def test_locale_time_zone_and_hash_seed_change_nothing(
    index: PackageIndex, environ: dict[str, str], tmp_path: Path
) -> None:
    """The same bytes from two processes with other settings and other stores."""
    index.wheel("top", "1.0", requires=("a", "b"))
    for name in ("a", "b"):
        index.wheel(name, "1.0")
        index.wheel(name, "1.1", tag=LINUX)
    outputs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environ | settings | {"KITBUILD_HOME": str(tmp_path / f"store{number}")},
            capture_output=True,
            check=True,
        ).stdout
        for number, settings in enumerate(
            (
                {"LC_ALL": "C", "TZ": "UTC", "PYTHONHASHSEED": "1"},
                {"LC_ALL": "tr_TR.UTF-8", "TZ": "Asia/Kathmandu", "PYTHONHASHSEED": "2"},
            )
        )
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].count(b"\n") == 3


BACKEND = """
import os, zipfile
def build_wheel(directory, config_settings=None, metadata_directory=None):
    name = "raw-1.0-TAG.whl"
    with zipfile.ZipFile(os.path.join(directory, name), "w") as archive:
        def add(path, text):
            archive.writestr(zipfile.ZipInfo(path), text)
        add("raw/__init__.py", "SEED = %r\\n" % os.environ.get("PYTHONHASHSEED"))
        add("raw-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: raw\\nVersion: 1.0\\nRequires-Dist: low\\n")
        add("raw-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: TAG\\n")
        add("raw-1.0.dist-info/RECORD", "")
    return name
"""


def sdist(tag: str = "py3-none-any") -> bytes:
    """A source distribution that brings its own build backend."""
    files = {
        "PKG-INFO": "Metadata-Version: 2.2\nName: raw\nVersion: 1.0\nRequires-Dist: low\n",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "raw"\nversion = "1.0"\ndependencies = ["low"]\n',
        "backend.py": BACKEND.replace("TAG", tag),
    }
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for path, text in files.items():
            member = tarfile.TarInfo(f"raw-1.0/{path}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return stream.getvalue()


@pytest.fixture
def known_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdists, "BUILDS", {"raw": sdists.Build(requires=(), env={"EXTRA": "1"})})


@pytest.mark.usefixtures("known_build")
def test_a_known_source_is_built_once_and_locked_as_a_wheel(
    index: PackageIndex, store: Store, environ: dict[str, str]
) -> None:
    """The lock says what it was built from; its needs are resolved with the rest; a second lock builds nothing."""
    index.wheel("low", "1.0")
    digest = index.publish("raw", "raw-1.0.tar.gz", sdist())
    notes = Notes()
    low, raw = resolve({"raw": "1.0"}, store, environ, progress=notes)
    assert (low.name, raw.name, raw.file, raw.index) == ("low", "raw", "raw-1.0-py3-none-any.whl", "built")
    assert raw.built is not None
    assert (raw.built.sdist_sha256, raw.built.requires, raw.built.env["EXTRA"]) == (digest, (), "1")
    assert raw.built.python == "py3", "and not the Python of this machine"
    assert raw.built.env["PYTHONHASHSEED"] == "0"
    assert b"SEED = '0'" in store.path(raw.sha256).read_bytes()
    assert notes.lines == ["packages: raw-1.0.tar.gz has no wheel; building it"]
    assert resolve({"raw": "1.0"}, store, environ, progress=notes) == (low, raw)
    assert len(notes.lines) == 1


@pytest.mark.usefixtures("known_build")
def test_a_built_wheel_is_built_again_where_it_is_missing(
    index: PackageIndex, store: Store, environ: dict[str, str], tmp_path: Path
) -> None:
    """On another machine the same bytes come out; other bytes are exit 7, and another source is exit 4."""
    index.wheel("low", "1.0")
    index.publish("raw", "raw-1.0.tar.gz", sdist())
    _, raw = resolve({"raw": "1.0"}, store, environ)
    other = Store.open({"KITBUILD_HOME": str(tmp_path / "other")})
    assert locate_wheels([raw], lock=lock_of(), indexes={}, store=other, environ=environ) == []
    assert other.has(raw.sha256)
    wrong = raw.model_copy(update={"sha256": "0" * 64})
    with pytest.raises(VerificationError, match=r"^raw-1.0-py3-none-any.whl: built again it has sha256"):
        locate_wheels([wrong], lock=lock_of(), indexes={}, store=other, environ=environ)
    index.publish("raw", "raw-1.0.tar.gz", sdist("py3-none-any") + b"\0")
    environ["UV_CACHE_DIR"] = str(tmp_path / "cache")
    third = Store.open({"KITBUILD_HOME": str(tmp_path / "third")})
    with pytest.raises(ResolveError, match=r"^no package index offers the locked source of raw-1.0"):
        locate_wheels([raw], lock=lock_of(), indexes={}, store=third, environ=environ)


@pytest.mark.usefixtures("known_build")
def test_a_build_for_this_machine_cannot_be_locked(index: PackageIndex, store: Store, environ: dict[str, str]) -> None:
    """A wheel with this machine's code, or for this machine's Python, is refused by name."""
    index.wheel("low", "1.0")
    index.publish("raw", "raw-1.0.tar.gz", sdist("cp311-cp311-linux_x86_64"))
    with pytest.raises(ResolveError, match=r"^raw-1.0-cp311-cp311-linux_x86_64.whl is built for this machine's"):
        resolve({"raw": "1.0"}, store, environ)
    index.publish("raw", "raw-1.0.tar.gz", sdist("cp311-none-any"))
    environ["UV_CACHE_DIR"] += "-of-its-own"
    with pytest.raises(
        ResolveError, match=r"^raw-1.0-cp311-none-any.whl is built for this machine's processor or Pyth"
    ):
        resolve({"raw": "1.0"}, store, environ)


@pytest.mark.slow
def test_the_tested_cuda128_set_resolves(store: Store) -> None:
    """The real set for CUDA 12.8 and its own Python, with torch's CUDA from what torch itself brings."""
    target = load_target("cuda128")
    found = resolve_wheels(
        target.packages,
        python="3.12.3",
        glibc="2.39",
        architecture="amd64",
        torch_backend=target.torch_backend,
        indexes={},
        store=store,
        environ=dict(os.environ),
        progress=Silent(),
    )
    locked = versions(found)
    assert locked["torch"].partition("+")[0] == "2.10.0"
    assert locked["nvidia-cuda-runtime-cu12"].startswith("12.8.")
    assert load_known()["torch"]["2.10.0"].with_ == {"triton": f"=={locked['triton']}"}
    assert len(found) > 80
    assert all("cp312" in wheel.file or "py3" in wheel.file or "abi3" in wheel.file for wheel in found)


@pytest.mark.slow
def test_the_tested_cpu_set_resolves(store: Store) -> None:
    """The real set for the CPU, from whatever indexes this machine has: every wheel fits, twice the same."""
    target = load_target("cpu")
    first, again = (
        resolve(target.packages, store, dict(os.environ), torch_backend=target.torch_backend) for _ in range(2)
    )
    assert first == again
    assert versions(first)["torch"] == "2.13.0+cpu"
    assert len(first) > 50


def test_an_address_of_a_login_is_good_for_its_origin_only() -> None:
    """A password of one index never goes to another host or port."""
    environ = {"UV_INDEX": "corp=http://me:a%2Fb@index.example:8080/simple", "HOME": "/nowhere"}
    sources = Sources.read({}, environ | {"PIP_CONFIG_FILE": os.devnull})
    assert sources.headers("http://index.example:8080/files/x.whl") == (("Authorization", "Basic bWU6YS9i"),)
    assert sources.headers("http://index.example/files/x.whl") == ()
    assert sources.headers("https://index.example:8080/files/x.whl") == ()
