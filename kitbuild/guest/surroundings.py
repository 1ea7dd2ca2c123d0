"""Phase 1, beside the bytes: what was set or mounted here and would change what runs. Standard library only.

Only a container is closed: without one, kitbuild itself passes the few variables that reach the guest.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from kitbuild.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import ModuleType

    from kitbuild.guest.config import Config

PYTHON_NOTES = "https://docs.python.org/3/using/cmdline.html#environment-variables"
LOADER_NOTES = "https://man7.org/linux/man-pages/man8/ld.so.8.html"
# Variables that bring in code, or take effect before the guest's first line: too late to unset. Name, what, source.
REFUSED: tuple[tuple[str, str, str], ...] = (
    ("LOCAL_KERNELS", "would replace the locked kernels", "https://github.com/huggingface/kernels"),
    ("PYTHONPATH", "would put code that nobody locked before the locked packages", PYTHON_NOTES),
    ("PYTHONHOME", "would take another standard library", PYTHON_NOTES),
    ("PYTHONPLATLIBDIR", "would take another standard library", PYTHON_NOTES),
    ("PYTHONPYCACHEPREFIX", "would take compiled modules that nobody locked", PYTHON_NOTES),
    ("PYTHONUSERBASE", "would add packages that nobody locked", PYTHON_NOTES),
    ("PYTHONOPTIMIZE", "would leave out the libraries' own checks", PYTHON_NOTES),
    ("LD_PRELOAD", "would put code that nobody locked into every process", LOADER_NOTES),
    ("LD_AUDIT", "would put code that nobody locked into every process", LOADER_NOTES),
    ("LD_LIBRARY_PATH", "would take libraries that nobody locked", LOADER_NOTES),
    (
        "GLIBC_TUNABLES",
        "would choose other variants of the C library's mathematics",
        "https://sourceware.org/glibc/manual/latest/html_node/Hardware-Capability-Tunables.html",
    ),
)
# Where NVIDIA's images and container toolkit put the driver's own libraries.
# https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/docker-specialized.html
LIBRARY_FOLDERS = re.compile(r"/usr/local/nvidia/lib(64)?|/usr/local/cuda[^/]*(/.*)?|/opt/kit(/.*)?")
DRIVER_FILES = re.compile(r"/(?:[^/]*nvidia[^/]*|libcuda[^/]*|libnv[^/]*|libEGL_[^/]*|libGLX?_[^/]*)(?:/|$)")
CODE_FOLDERS = re.compile(r"/(?:kit|opt|usr|bin|sbin|lib|lib32|lib64|libx32)(?:/|$)|/etc/(?:ld\.so|python)")
COMPILED = {"triton": "Triton's kernels", "inductor": "Inductor's kernels", "extensions": "C++ extensions"}
MOUNTS = Path("/proc/self/mountinfo")


def in_image(config: Config) -> bool:
    """Whether the guest runs in a container of its own."""
    return config.locked and config.engine != "local"


def problems(config: Config, environ: Mapping[str, str], mounts: Path = MOUNTS) -> Iterator[Problem]:
    """Variables, mounts and caches that bring in what is not locked."""
    closed = in_image(config)
    for name, what, _ in REFUSED:
        if environ.get(name) and (closed or name == "LOCAL_KERNELS") and not _harmless(name, environ[name]):
            yield Problem(message=f"{name} is set and {what}", key=name, hint=f"unset {name}")
    if closed:
        yield from _mounts(mounts.read_text(encoding="utf-8", errors="replace"))
        if config.strict:
            yield from _compiled(config)


def _harmless(name: str, value: str) -> bool:
    """The library path that NVIDIA's own images have."""
    return name == "LD_LIBRARY_PATH" and all(LIBRARY_FOLDERS.fullmatch(item) for item in value.split(":"))


def _mounts(table: str) -> Iterator[Problem]:
    """Something laid over the image where programs are: what the digests say of it would not be what runs."""
    for line in table.splitlines():
        # https://man7.org/linux/man-pages/man5/proc_pid_mountinfo.5.html
        point = line.split()[4].encode().decode("unicode_escape")
        if CODE_FOLDERS.match(point) and not DRIVER_FILES.search(point):
            yield Problem(
                message="is mounted over the image", file=point, hint=f"start it without the mount on {point}"
            )


def _compiled(config: Config) -> Iterator[Problem]:
    for folder, what in COMPILED.items():
        place = config.places.cache / folder
        if any(path.is_file() for path in place.rglob("*")):
            text = f"holds {what} from before, which nobody locked"
            yield Problem(message=text, file=str(place), hint="start with an empty /cache, or determinism: record")


def compiled_before(config: Config) -> list[str]:
    """Caches of compiled code that were not empty when the run began, for the archive."""
    places = {name: config.places.cache / name for name in COMPILED}
    return [name for name, place in places.items() if any(path.is_file() for path in place.rglob("*"))]


def imported(
    config: Config, path: Iterable[str] | None = None, modules: Mapping[str, ModuleType] | None = None
) -> Iterator[Problem]:
    """Places that Python searches, and modules that it took, other than the image's own."""
    if not in_image(config):
        return
    allowed = [config.places.root / "opt" / "kit", config.places.kernels, *map(Path, _standard_library())]
    tops = tuple(os.path.realpath(place) for place in allowed)

    def foreign(found: str) -> bool:
        real = os.path.realpath(found)
        return not any(real == top or real.startswith(f"{top}/") for top in tops) or "/dist-packages" in real

    searched = [place or os.getcwd() for place in (sys.path if path is None else path)]  # noqa: PTH109 - as sys.path has it
    told = [place for place in dict.fromkeys(searched) if foreign(place) and Path(place).is_dir()]
    for place in told:
        yield Problem(message="is searched for modules", file=place, hint="unset the variable that names it")
    known = tuple(f"{os.path.realpath(place)}/" for place in told)
    for name, module in sorted((sys.modules if modules is None else modules).items()):
        file = getattr(module, "__file__", None)
        # By its folder: Debian's own sitecustomize.py is a link from the standard library into /etc, both of the base.
        outside = isinstance(file, str) and file.startswith("/") and foreign(os.path.dirname(file))  # noqa: PTH120
        if isinstance(file, str) and outside and not file.startswith(known):
            yield Problem(message=f"was imported as {name}", file=file, hint="remove it: nobody locked it")


def _standard_library() -> set[str]:
    found = sysconfig.get_paths()
    return {found["stdlib"], found["platstdlib"], sysconfig.get_path("stdlib", vars={"base": sys.base_prefix})}
