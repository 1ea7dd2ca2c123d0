"""What is set or mounted where the guest starts: refused by name, or without effect and recorded."""

from __future__ import annotations

import json
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.errors import VerificationError
from kitbuild.guest import surroundings
from kitbuild.guest.config import Config
from kitbuild.guest.verify import Verification

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.guest.root import Root

IMAGE = {"KIT_ENGINE": "docker"}
DOCKER = (
    "77 53 0:39 / / rw,relatime master:2 - overlay overlay rw,lowerdir=/var/lib/docker\n"
    "78 77 0:42 / /proc rw,nosuid - proc proc rw\n"
    "81 77 0:45 / /sys ro,nosuid - sysfs sysfs ro\n"
    "93 79 0:47 / /dev/shm rw,nosuid - tmpfs shm rw,size=65536k\n"
    "94 77 254:0 /c/resolv.conf /etc/resolv.conf rw,relatime - ext4 /dev/vda rw\n"
    "97 77 254:0 /runs/x /out rw,relatime - ext4 /dev/vda rw\n"
    "98 77 254:0 /trees/x /inputs/model ro,relatime - ext4 /dev/vda rw\n"
)
NVIDIA = (
    "99 77 254:0 /x /usr/lib/x86_64-linux-gnu/libcuda.so.580.82 ro - ext4 /dev/vda rw\n"
    "99 77 254:0 /x /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.82 ro - ext4 /dev/vda rw\n"
    "99 77 254:0 /x /usr/bin/nvidia-smi ro - ext4 /dev/vda rw\n"
    "99 77 254:0 /x /usr/lib/firmware/nvidia/580.82/gsp_ga10x.bin ro - ext4 /dev/vda rw\n"
    "99 77 254:0 /x /usr/local/nvidia ro - ext4 /dev/vda rw\n"
    "99 77 254:0 /x /run/nvidia-persistenced/socket rw - tmpfs tmpfs rw\n"
)


def told(root: Root, mounts: Path, **environ: str) -> dict[str, str]:
    config = Config.read(root.environ | IMAGE)
    found = list(surroundings.problems(config, environ, mounts))
    assert all(problem.hint for problem in found)
    return {str(problem.key or problem.file): problem.message for problem in found}


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(DOCKER + NVIDIA)
    return path


def test_an_ordinary_container(build: Callable[..., Root], mounts: Path) -> None:
    """The engine's own mounts, NVIDIA's driver and library path, and the image's variables are nothing to tell."""
    path = "/usr/local/nvidia/lib:/usr/local/nvidia/lib64"
    assert told(build(), mounts, LD_LIBRARY_PATH=path, PATH="/bin", PYTHONHASHSEED="0", HF_HOME="/cache/hf") == {}


@pytest.mark.parametrize("name", [name for name, *_ in surroundings.REFUSED])
def test_code_from_outside(build: Callable[..., Root], mounts: Path, name: str) -> None:
    """Each variable that brings in code, or takes effect before the guest's first line, is refused by name."""
    root = build()
    assert told(root, mounts, **{name: "/evil"}).keys() == {name}
    assert told(root, mounts, **{name: ""}) == {}
    with pytest.raises(VerificationError, match=name):
        Verification(Config.read(root.environ | IMAGE), {name: "/evil"}).wait()


@pytest.mark.parametrize("name", ["PYTHONPATH", "LD_PRELOAD", "LD_LIBRARY_PATH"])
def test_without_a_container(build: Callable[..., Root], name: str) -> None:
    """Without a container kitbuild itself passes these; LOCAL_KERNELS is refused there too."""
    root = build()
    Verification(Config.read(root.environ), {name: "/somewhere"}).wait()
    with pytest.raises(VerificationError, match="LOCAL_KERNELS"):
        Verification(Config.read(root.environ), {"LOCAL_KERNELS": "a/b=/tmp/c"}).wait()


@pytest.mark.parametrize("path", ["/tmp/lib", "/usr/local/nvidia/lib:", "/usr/local/nvidia/lib:/opt/evil", ":/opt/kit"])  # noqa: S108 - text
def test_library_path(build: Callable[..., Root], mounts: Path, path: str) -> None:
    """A library path beyond NVIDIA's, the current directory among them, is refused."""
    assert told(build(), mounts, LD_LIBRARY_PATH=path).keys() == {"LD_LIBRARY_PATH"}


@pytest.mark.parametrize(
    "point",
    [
        "/opt/kit/lib/python3.11/site-packages/torch",
        "/usr/lib/python3.11",
        "/usr/bin/python3.11",
        "/lib/x86_64-linux-gnu/libm.so.6",
        "/kit/kernels",
        "/etc/ld.so.preload",
        "/etc/python3.11",
        "/etc/python3.11/sitecustomize.py",
        "/usr/local/lib/with\\040space",
    ],
)
def test_mounted_over_the_image(build: Callable[..., Root], mounts: Path, point: str) -> None:
    """What is laid over a place of programs is named: nobody locked it, and the base's files are not in the lock."""
    mounts.write_text(f"{DOCKER}99 77 254:0 /home/me {point} rw - ext4 /dev/vda rw\n{NVIDIA}")
    assert told(build(), mounts) == {point.replace("\\040", " "): "is mounted over the image"}


@pytest.mark.parametrize(("mode", "expected"), [("strict", True), ("record", False)])
def test_compiled_code_from_before(build: Callable[..., Root], mounts: Path, mode: str, expected: bool) -> None:  # noqa: FBT001
    """A mounted cache that holds compiled kernels is refused under strict, and recorded in either mode."""
    root = build(determinism=mode)
    (root.cache / "triton/abc").mkdir(parents=True)
    (root.cache / "inductor").mkdir()
    config = Config.read(root.environ | IMAGE)
    assert surroundings.compiled_before(config) == []
    (root.cache / "triton/abc/kernel.cubin").write_text("")
    assert told(root, mounts).keys() == ({str(root.cache / "triton")} if expected else set())
    assert surroundings.compiled_before(config) == ["triton"]


def module(file: Path | str) -> Any:
    made = ModuleType("made")
    made.__file__ = str(file)
    return made


def test_searched_and_imported(build: Callable[..., Root], tmp_path: Path) -> None:
    """Modules from the image and the standard library are right; a path or module from elsewhere is named."""
    root = build()
    config = Config.read(root.environ | IMAGE)
    site = root.path / "opt/kit/lib/python3.11/site-packages"
    (tmp_path / "evil").mkdir()
    standard = [os.__file__, json.__file__]
    path = [str(site), os.path.dirname(os.__file__), str(tmp_path / "none")]  # noqa: PTH120 - as sys.path has it
    modules = {"os": module(standard[0]), "json": module(standard[1]), "torch": module(site / "torch.py"), "sys": sys}
    kernel = config.places.kernels / "kernels--a--b/snapshots/c/build/d/__init__.py"
    assert list(surroundings.imported(config, path, {**modules, "kernel": module(kernel)})) == []
    modules["sitecustomize"] = module(tmp_path / "evil/sitecustomize.py")
    modules["usercustomize"] = module("/usr/lib/python3/dist-packages/usercustomize.py")
    found = list(surroundings.imported(config, [*path, str(tmp_path / "evil")], modules))
    assert [(problem.file, problem.message) for problem in found] == [
        (str(tmp_path / "evil"), "is searched for modules"),
        ("/usr/lib/python3/dist-packages/usercustomize.py", "was imported as usercustomize"),
    ]
    found = list(surroundings.imported(config, path, modules))
    assert [problem.message for problem in found] == ["was imported as sitecustomize", "was imported as usercustomize"]


def test_a_link_within_the_base_is_the_base_s(build: Callable[..., Root], monkeypatch: Any, tmp_path: Path) -> None:
    """Debian's standard library has sitecustomize.py as a link into /etc."""
    (tmp_path / "stdlib").mkdir()
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/sitecustomize.py").write_text("")
    (tmp_path / "stdlib/sitecustomize.py").symlink_to(tmp_path / "etc/sitecustomize.py")
    monkeypatch.setattr(surroundings, "_standard_library", lambda: {str(tmp_path / "stdlib")})
    config = Config.read(build().environ | IMAGE)
    modules = {"sitecustomize": module(tmp_path / "stdlib/sitecustomize.py")}
    assert list(surroundings.imported(config, [], modules)) == []
    modules = {"sitecustomize": module(tmp_path / "etc/sitecustomize.py")}
    assert [problem.message for problem in surroundings.imported(config, [], modules)] == [
        "was imported as sitecustomize"
    ]


def test_current_directory_is_not_searched(build: Callable[..., Root], monkeypatch: Any, tmp_path: Path) -> None:
    """An empty entry is the current directory, which a run's user can write to."""
    monkeypatch.chdir(tmp_path)
    config = Config.read(build().environ | IMAGE)
    assert [problem.file for problem in surroundings.imported(config, [""], {})] == [str(tmp_path)]
