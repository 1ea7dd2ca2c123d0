"""What may be in no layer: words of the machine that builds, and files that only a build or its tools leave."""

from __future__ import annotations

import fnmatch
import re
import socket
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

PIECE_BYTES = 32 << 20
SECRETS: Mapping[str, str] = {
    "HF_TOKEN": "hf_markerOfASecretToken",
    "HUGGING_FACE_HUB_TOKEN": "hf_markerOfAnotherToken",
    "AWS_SECRET_ACCESS_KEY": "markerOfAnAccessKey",
    "GITHUB_TOKEN": "ghp_markerOfAGitToken",
    "WANDB_API_KEY": "markerOfATrackingKey",
    "UV_INDEX_TEAM_PASSWORD": "markerOfAnIndexPassword",
    "HTTPS_PROXY": "http://user:markerOfAProxy@proxy.invalid:3128",
    "https_proxy": "http://user:markerOfAProxy@proxy.invalid:3128",
    "HTTP_PROXY": "http://user:markerOfAProxy@proxy.invalid:3128",
    "NO_PROXY": "markerOfNoProxy.invalid,127.0.0.1,localhost",
    "SSL_CERT_FILE": "/etc/markerOfACa/bundle.pem",
    "REQUESTS_CA_BUNDLE": "/etc/markerOfACa/bundle.pem",
    "CURL_CA_BUNDLE": "/etc/markerOfACa/bundle.pem",
    "PIP_INDEX_URL": "https://user:markerOfAMirror@mirror.invalid/simple",
    "USER": "markerOfAUser",
    "LOGNAME": "markerOfAUser",
}
"""An environment of a machine that builds; each value has a word by which it is found again."""
WORDS = tuple(sorted({word.encode() for value in SECRETS.values() for word in re.findall(r"\w*marker\w+", value)}))
# Left by build tools and package managers. Licence texts that wheels bring may be called anything.
UNWANTED = (
    *("*/.git/*", "*/.cache/*", "*/.netrc", "*/.pypirc", "*/.ssh/*", "*/.docker/*", "*/pip.conf", "*/uv_cache.json"),
    *("*/direct_url.json", "*.dist-info/REQUESTED", "*/.lock", "*.pyc.[0-9]*", "home/?*", "root/[!.]*", "tmp/?*"),
    *("var/tmp/?*", "var/lib/apt/lists/?*", "var/cache/apt/?*", "var/log/?*", "etc/resolv.conf", "etc/hostname"),
    *("etc/machine-id", "etc/apt/sources.list", "etc/apt/sources.list.d/?*", "etc/apt/apt.conf.d/*proxy*", "run/?*"),
)
TOOLS = ("pip", "uv", "setuptools", "wheel", "build", "hatchling", "installer")
"""Of the host: in the image only where they are locked."""


def words_of_this_machine(*paths: Path) -> tuple[bytes, ...]:
    """Paths and the host's name, where they are long enough to mean anything."""
    names = {str(path) for path in (*paths, Path.home())} | {socket.gethostname()}
    return tuple(sorted(name.encode() for name in names if len(name) > 7 and name != "localhost"))


def found_words(path: Path, words: Iterable[bytes]) -> set[bytes]:
    """Which of the words a file holds, anywhere."""
    wanted, seen, rest = tuple(words), set(), b""
    longest = max(map(len, wanted))
    with path.open("rb") as stream:
        while piece := stream.read(PIECE_BYTES):
            data = rest + piece
            seen |= {word for word in wanted if word in data}
            rest = data[-longest:]
    return seen


def unwanted(layer: Path, *, locked: Iterable[str]) -> Iterator[str]:
    """Names of files and folders in a layer that no image should have."""
    tools = {name for name in TOOLS if name not in set(locked)}
    with tarfile.open(layer) as archive:
        for member in archive:
            name = member.name
            if "/_vendor/" in name:  # what a wheel brings of other packages, their notes included
                continue
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in UNWANTED):
                yield name
            folder = re.search(r"/site-packages/([^/]+)", name)
            if folder and re.split(r"[-.]", folder[1])[0] in tools:
                yield name
