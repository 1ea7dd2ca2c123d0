"""Nothing of the machine that builds is in what it builds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from kitbuild.image.config import ENVIRONMENT
from tests.image import scan
from tests.image.kit import new_store

CHECKOUT = Path(__file__).parents[2]
BUILD = """
import json, sys
from pathlib import Path
from kitbuild.image import HostCompiler, assemble, write_oci
from kitbuild.progress import Silent
from tests.image.kit import RECIPE, make_lock, new_store
folder = Path(sys.argv[1])
store = new_store(folder / "store")
lock = make_lock(store, bake=("model", "dataset"))
image = assemble(lock, recipe=RECIPE, store=store, compiler=HostCompiler(Path(sys.executable)), progress=Silent())
write_oci(image, folder / "image.tar")
(folder / "config.json").write_bytes(image.config)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an image that was built in an environment full of secrets."""
    folder = tmp_path_factory.mktemp("a-long-name-of-a-folder-on-the-host")
    subprocess.run(
        [sys.executable, "-c", BUILD, folder],
        env={**os.environ, **scan.SECRETS, "PYTHONPATH": str(CHECKOUT), "TMPDIR": str(folder)},
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return folder


def test_no_word_of_the_host_is_in_the_image(built: Path) -> None:
    """Neither secrets, proxies, CA, user, host name nor paths of this machine are in a byte of the archive."""
    words = (*scan.WORDS, *scan.words_of_this_machine(built, CHECKOUT, Path(sys.prefix), Path(sys.base_prefix)))
    assert len(words) > 12
    assert scan.found_words(built / "image.tar", words) == set()


def test_no_variable_of_the_host_is_set_in_the_image(built: Path) -> None:
    """The image's environment is the base's and kitbuild's own, by name and value."""
    variables = dict(entry.split("=", 1) for entry in json.loads((built / "config.json").read_bytes())["config"]["Env"])
    base = {"NVIDIA_VISIBLE_DEVICES": "all"}
    assert variables == {**ENVIRONMENT, **base, "PATH": "/opt/kit/bin:/usr/bin:/bin"}


def test_no_file_of_a_build_tool_is_in_a_layer(built: Path) -> None:
    """No cache, no installer's notes, no package manager that is not locked."""
    store = new_store(built / "store")
    with tarfile.open(built / "image.tar") as archive:
        manifest = json.load(archive.extractfile("manifest.json"))  # type: ignore[arg-type]
    for name in manifest[0]["Layers"]:
        assert list(scan.unwanted(store.path(name.rpartition("/")[2]), locked=())) == []


def test_the_scan_finds_what_it_looks_for(tmp_path: Path) -> None:
    """A word across two pieces, and a file of each kind that is unwanted."""
    path = tmp_path / "layer"
    word = scan.WORDS[0]
    path.write_bytes(b"x" * (scan.PIECE_BYTES - 3) + word)
    assert scan.found_words(path, scan.WORDS) == {word}
    bad = [
        *("opt/kit/lib/python3.11/site-packages/pip/__init__.py", "opt/kit/lib/x.dist-info/direct_url.json"),
        *("root/.cache/uv/x", "var/lib/apt/lists/deb", "etc/resolv.conf", "opt/kit/lib/.git/HEAD"),
    ]
    good = ["opt/kit/lib/python3.11/site-packages/pipeline/__init__.py", "etc/ssl/certs/ca-certificates.crt", "tmp"]
    with tarfile.open(path, "w") as archive:
        for name in (*bad, *good):
            archive.addfile(tarfile.TarInfo(name))
    assert list(scan.unwanted(path, locked=())) == bad
    assert list(scan.unwanted(path, locked=("pip",))) == bad[1:]
