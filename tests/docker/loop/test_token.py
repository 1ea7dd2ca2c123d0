"""The token that reads a private repository goes to the Hub and nowhere else."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.docker.loop.recipes import read_lock, recipe
from tests.hub.fixtures import READER_TOKEN, STRANGER_TOKEN, standard_hub
from tests.image import scan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kitbuild.store import Store
    from tests.docker.loop.command import Kitbuild

pytestmark = [pytest.mark.docker, pytest.mark.slow_extra]
TOKENS = (READER_TOKEN.encode(), STRANGER_TOKEN.encode())
RECIPE = """
kitbuild: 1
name: private
model: {repo: test-org/private-model, revision: main, dtype: float32}
dataset: {path: data/commands-train.jsonl}
kernels: {attention: eager}
image: {cuda: cpu, bake: [model]}
batch: {global: 4, micro: 4}
train: {max_length: 64, max_steps: 1, learning_rate: 1.0e-3, gradient_checkpointing: false}
launch: {threads_per_process: 2}
"""


def written_since(root: Path, moment: float) -> Iterator[Path]:
    """Every file that may have been written since, wherever it lies below."""
    for folder, _below, names in os.walk(root):
        for name in names:
            path = Path(folder) / name
            if path.is_file() and not path.is_symlink() and path.stat().st_mtime >= moment:
                yield path


def test_token_is_in_nothing_that_is_written_or_said(kit: Kitbuild, store: Store, tmp_path: Path) -> None:
    """Lock, image with the model in it, run: no file, layer, log, message or error has a token in it."""
    moment = time.time() - 1
    said: list[str] = []
    source = tmp_path / "private.yaml"
    source.write_text(RECIPE)
    with standard_hub(tmp_path / "hub") as hub:
        there = kit.given(**hub.environment(tmp_path / "hf"))
        path = recipe(tmp_path / "recipe", source)
        for token in ("", STRANGER_TOKEN):
            refused = there.given(HF_TOKEN=token)
            said += [str(refused.fails(4, "lock", path)), refused.says(4, "lock", path)]
        reader = there.given(HF_TOKEN=READER_TOKEN)
        hub.faults.add("/api/models/", kind="503", times=None)
        said += [str(reader.fails(4, "lock", path)), reader.says(4, "lock", path)]
        hub.faults.clear()
        for command in (("lock",), ("image", "-v"), ("run", "-v", "--out", tmp_path / "runs")):
            code, out, err = reader.ends(command[0], path, *command[1:])
            assert code == 0, out + err
            said += [out, err]
        tokens = {request.headers.get("authorization") for request in hub.requests}
        assert f"Bearer {READER_TOKEN}" in tokens
    lock = read_lock(path)
    assert lock.model.weights is not None
    blobs = [store.path(file.sha256) for file in lock.model.weights.files]
    files = {*written_since(store.root, moment), *written_since(tmp_path, moment), *blobs}
    assert len(files) > 30
    assert [file for file in files if scan.found_words(file, TOKENS)] == []
    assert [text for text in said if READER_TOKEN in text or STRANGER_TOKEN in text] == []
