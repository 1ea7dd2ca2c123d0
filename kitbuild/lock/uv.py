"""Step 2: the one function through which uv is run, and what it says in our words.

uv resolves for the target (`--python-platform`, `--python-version`) from the user's own settings: its variables and
uv.toml, and pip's settings where uv's are silent.
"""

from __future__ import annotations

import base64
import netrc
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit, urlunsplit

from packaging.pylock import Pylock, PylockValidationError
from uv import find_uv_bin

from kitbuild.errors import ResolveError
from kitbuild.lock.pip_config import read_pip_settings
from kitbuild.store.http import origin

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kitbuild.lock.pip_config import PipSettings
    from kitbuild.lock.platform import Platform
    from kitbuild.progress import Progress
    from kitbuild.store import Store

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_URL = re.compile(r"\b(https?|file)://[^\s`'\"()]+")
_WHEELS_ONLY = ["--only-binary", ":all:"]
_UNREACHABLE = ("Failed to fetch", "Request failed", "error sending request", "dns error", "Could not connect")


class NoSolutionError(ResolveError):
    """No set of versions fits."""


class UnreachableError(ResolveError):
    """An index does not answer."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where packages come from: the recipe's named indexes, uv's variables, pip's settings.

    An index of the recipe is asked first, and a package that it has comes from it alone, as uv does. Only where that
    has no solution (PyTorch's own index holds old versions of much that others need) is the best version of any index
    taken. `spare` are pip's extra indexes: asked only then too, so that a lock does not depend on what else a machine
    happens to know.
    """

    named: Mapping[str, str]
    environ: Mapping[str, str]
    pip: PipSettings
    find_links: tuple[str, ...]

    @classmethod
    def read(cls, indexes: Mapping[str, str], environ: Mapping[str, str]) -> Sources:
        """From the recipe's `image.indexes` and the user's settings."""
        pip = read_pip_settings(environ)
        own = tuple(part for part in re.split(r"[,\s]+", environ.get("UV_FIND_LINKS", "")) if part)
        return cls(named=indexes, environ=environ, pip=pip, find_links=tuple(dict.fromkeys(own + pip.find_links)))

    def with_links(self, folder: Path) -> Sources:
        """Also from the wheels in `folder`."""
        return replace(self, find_links=(*self.find_links, str(folder)))

    @property
    def spare(self) -> tuple[str, ...]:
        """Extra indexes of pip, where uv has none of its own."""
        ours = any(self.environ.get(name) for name in ("UV_INDEX", "UV_EXTRA_INDEX_URL"))
        return () if ours else self.pip.extra_index_urls

    @property
    def has_more(self) -> bool:
        """Whether there is a second way to ask, `spare`."""
        return bool(self.spare or self.named)

    def variables(self, *, spare: bool) -> dict[str, str]:
        """The environment for uv."""
        found = {key: value for key, value in self.environ.items() if key not in {"VIRTUAL_ENV", "CONDA_PREFIX"}}
        own = [f"{name}={url}" for name, url in sorted(self.named.items())]
        others = [found.pop(name, "") for name in ("UV_INDEX", "UV_EXTRA_INDEX_URL")]
        indexes = " ".join(part for part in (*own, *others, *(self.spare if spare else ())) if part)
        found |= {"UV_INDEX": indexes} if indexes else {}
        if spare:  # as pip does: the best version of any index
            found.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
        if self.pip.index_url and not any(found.get(name) for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL")):
            found["UV_DEFAULT_INDEX"] = self.pip.index_url
        if self.pip.no_index:
            found["UV_NO_INDEX"] = "1"
        if self.find_links:
            found["UV_FIND_LINKS"] = ",".join(self.find_links)
        bundle = self.pip.cert or found.get("REQUESTS_CA_BUNDLE") or found.get("CURL_CA_BUNDLE")
        if bundle and not found.get("SSL_CERT_FILE"):
            found["SSL_CERT_FILE"] = bundle
        return found | {"NO_COLOR": "1", "UV_NO_PROGRESS": "1", "UV_PYTHON_DOWNLOADS": "never", "LC_ALL": "C.UTF-8"}

    @property
    def trusting(self) -> dict[str, str]:
        """The environment for downloads of our own: with the CA that pip is told of, where no other is named."""
        named = any(self.environ.get(name) for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"))
        return dict(self.environ) if named or not self.pip.cert else {**self.environ, "SSL_CERT_FILE": self.pip.cert}

    def headers(self, url: str) -> tuple[tuple[str, str], ...]:
        """What authorises a download: uv leaves a password out of the addresses that it gives."""
        texts = [*self.named.values(), *self.pip.extra_index_urls, self.pip.index_url or ""]
        for name in ("UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"):
            texts += [part.partition("=")[2] or part for part in self.environ.get(name, "").split()]
        for text in (text for text in texts if "@" in text):
            parts = urlsplit(text)
            if parts.username and origin(text) == origin(url):
                return _basic(unquote(parts.username), unquote(parts.password or ""))
        return self._from_netrc(url)

    def _from_netrc(self, url: str) -> tuple[tuple[str, str], ...]:
        path = self.environ.get("NETRC") or str(Path(self.environ.get("HOME", "~")).expanduser() / ".netrc")
        try:
            found = netrc.netrc(path).authenticators(urlsplit(url).hostname or "")
        except (OSError, netrc.NetrcParseError):
            return ()
        return _basic(found[0], found[2] or "") if found else ()


def compile_pylock(
    requirements: Sequence[str],
    *,
    platform: Platform,
    sources: Sources,
    store: Store,
    progress: Progress,
    torch_backend: str | None = None,
    spare: bool = False,
    dependencies: bool = True,
    source_too: bool = False,
    preferences: Mapping[str, str] | None = None,
) -> Pylock:
    """Resolve to wheels. Raises `NoSolutionError` or `UnreachableError`."""
    with store.scratch() as folder:
        output = folder / "pylock.toml"
        if preferences:
            output.write_text(_earlier(preferences), encoding="utf-8")
        options = ["--format", "pylock.toml", "--output-file", str(output)]
        options += ["--torch-backend", torch_backend] if torch_backend else []
        options += [] if dependencies else ["--no-deps"]
        options += [] if source_too else _WHEELS_ONLY
        _compile(
            requirements,
            options,
            platform=platform,
            environ=sources.variables(spare=spare),
            folder=folder,
            progress=progress,
        )
        try:
            return Pylock.from_dict(tomllib.loads(output.read_text(encoding="utf-8")))
        except (PylockValidationError, tomllib.TOMLDecodeError) as error:
            raise ResolveError(f"uv wrote a lock that does not follow the standard: {error}") from error


def indexes_of(
    requirements: Sequence[str], *, platform: Platform, sources: Sources, store: Store, progress: Progress, spare: bool
) -> dict[str, str]:
    """Package to the recipe's index that it comes from, for exact versions: pylock.toml does not say it."""
    known = {_bare(url): name for name, url in sources.named.items()}
    with store.scratch() as folder:
        text = _compile(
            requirements,
            ["--emit-index-annotation", "--no-deps", "--no-annotate", *_WHEELS_ONLY],
            platform=platform,
            environ=sources.variables(spare=spare),
            folder=folder,
            progress=progress,
        )
    found: dict[str, str] = {}
    package = ""
    for line in text.splitlines():
        if line.lstrip().startswith("# from "):
            url = _bare(line.partition("# from ")[2])
            found |= {package: known[url]} if url in known else {}
        elif line and not line.startswith((" ", "#")):
            package = re.split(r"[=\s\[;@]", line, maxsplit=1)[0]
    return found


def _compile(
    requirements: Sequence[str],
    options: Sequence[str],
    *,
    platform: Platform,
    environ: Mapping[str, str],
    folder: Path,
    progress: Progress,
) -> str:
    command = [find_uv_bin(), "pip", "compile", "-", "--no-header"]
    command += ["--python", sys.executable, "--python-version", platform.python, "--python-platform", platform.uv_name]
    done = subprocess.run(
        [*command, *options],
        input="\n".join(requirements),
        cwd=folder,
        env=dict(environ),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    for line in done.stderr.splitlines():
        if "is yanked" in line:
            progress.note(f"packages: {hosts_only(line.partition('warning:')[2].strip() or line)}")
    if done.returncode:
        raise _failure(done.stderr)
    return done.stdout


def _failure(stderr: str) -> ResolveError:
    lines = [
        re.sub(r"^[\s\u2502\u2570\u251c\u2500\u25b6\u00d7]+", "", _ANSI.sub("", line)).strip()
        for line in stderr.splitlines()
    ]
    kept = [line for line in lines if line and not line.startswith("warning:")]
    hint = next((hosts_only(line.partition(":")[2].strip()) for line in kept if line.startswith("hint:")), None)
    facts = [re.sub(r"^(error|cause|Caused by):\s*", "", line) for line in kept if not line.startswith("hint:")]
    text = hosts_only(" ".join(facts))
    if any(sign in stderr for sign in _UNREACHABLE):
        url = _URL.search(stderr)
        place = urlsplit(url[0]).hostname if url else None
        return UnreachableError(
            f"the package index {place or ''} cannot be reached: {hosts_only(facts[-1])}".replace("  ", " "),
            hint="see to the network, or set UV_DEFAULT_INDEX (or pip's index-url) to a mirror",
        )
    reason = re.sub(r"^No solution found when resolving dependencies:?\s*", "", text)
    reason = re.sub(r"we can conclude that your requirements are unsatisfiable\b", "there is no solution", reason)
    return NoSolutionError(f"the packages do not fit together: {reason}", hint=hint)


def hosts_only(text: str) -> str:
    """Addresses reduced to their host."""
    return _URL.sub(lambda found: urlsplit(found[0]).hostname or "a local folder", text)


def _bare(url: str) -> str:
    parts = urlsplit(url.strip())
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))


def _basic(user: str, password: str) -> tuple[tuple[str, str], ...]:
    return (("Authorization", "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()),)


def _earlier(preferences: Mapping[str, str]) -> str:
    head = 'lock-version = "1.0"\ncreated-by = "kitbuild"\n'
    return head + "".join(
        f'[[packages]]\nname = "{name}"\nversion = "{version}"\nwheels = []\n'
        for name, version in sorted(preferences.items())
    )
