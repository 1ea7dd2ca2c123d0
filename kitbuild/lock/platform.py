"""Step 2: the target as packaging's standards see it, never the host. Pure.

Tags say which wheels fit (https://packaging.python.org/en/latest/specifications/platform-compatibility-tags/), the
environment says which markers hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from packaging import tags

if TYPE_CHECKING:
    from packaging.markers import Environment
    from packaging.tags import Tag

MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_OLD_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
_OLDEST_MINOR = {"x86_64": 5, "aarch64": 17}
# The glibc versions that uv has a platform for.
_UV_MINORS = (17, 28, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40)


@dataclass(frozen=True, kw_only=True)
class Platform:
    """Python (full version), glibc and machine of the image."""

    python: str
    glibc: str
    architecture: str

    @property
    def machine(self) -> str:
        """As `uname -m` has it."""
        return MACHINES[self.architecture]

    @property
    def python_version(self) -> tuple[int, int]:
        """Major and minor."""
        major, minor = self.python.split(".")[:2]
        return int(major), int(minor)

    @property
    def _glibc_minor(self) -> int:
        return int(self.glibc.split(".")[1])

    @property
    def uv_name(self) -> str:
        """The newest of uv's platforms that is not newer than the target."""
        minor = max((minor for minor in _UV_MINORS if minor <= self._glibc_minor), default=_UV_MINORS[0])
        return f"{self.machine}-manylinux_2_{minor}"

    @cached_property
    def tags(self) -> tuple[Tag, ...]:
        """Every tag that fits, the best first."""
        platforms: list[str] = []
        for minor in range(self._glibc_minor, _OLDEST_MINOR[self.machine] - 1, -1):
            platforms.append(f"manylinux_2_{minor}_{self.machine}")
            if minor in _OLD_NAMES:
                platforms.append(f"{_OLD_NAMES[minor]}_{self.machine}")
        platforms.append(f"linux_{self.machine}")
        interpreter = "cp{}{}".format(*self.python_version)
        return (
            *tags.cpython_tags(self.python_version, abis=[interpreter], platforms=platforms),
            *tags.compatible_tags(self.python_version, interpreter=interpreter, platforms=platforms),
        )

    @property
    def environment(self) -> Environment:
        """The markers' variables."""
        return {
            "implementation_name": "cpython",
            "implementation_version": self.python,
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": self.python,
            "python_version": "{}.{}".format(*self.python_version),
            "sys_platform": "linux",
        }
