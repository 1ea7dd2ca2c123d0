"""Whatever a stranger puts into an archive, reading and comparing it end in a value or in one of our errors."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kitbuild.archive import Archive, show
from kitbuild.compare import compare
from kitbuild.compare.report import page
from kitbuild.errors import KitbuildError
from tests.archive.factory import Run

if TYPE_CHECKING:
    from pathlib import Path

GOOD = Run().body()
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key and index below a value."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return [found for key, inner in items for found in [(*path, key), *places(inner, (*path, key))]]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Run().write(tmp_path_factory.mktemp("hostile") / "run")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    return Archive.read(Run().write(tmp_path_factory.mktemp("good") / "run"))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.sampled_from(places(GOOD)), value=VALUES)
def test_any_value_anywhere_in_a_manifest_is_survived(
    run_dir: Path, good: Archive, place: tuple[Any, ...], value: object
) -> None:
    """One value of any kind at any place: a verdict, a summary and a page, or an error of ours."""
    body = json.loads(json.dumps(GOOD))
    inner = body
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (run_dir / "manifest.json").write_text(json.dumps(body))
    with contextlib.suppress(KitbuildError):
        archive = Archive.read(run_dir, weights=True)
        show(archive).as_json()
        verdict = compare(good, archive)
        json.dumps(verdict.as_json())
        assert page(good, archive, verdict).startswith("<!doctype html>")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_any_bytes_of_weights_are_survived(run_dir: Path, data: bytes) -> None:
    """A weight file of any bytes is a problem, never a crash."""
    (run_dir / "manifest.json").write_text(json.dumps(GOOD))
    path = run_dir / "model" / "model.safetensors"
    good = path.read_bytes()
    try:
        path.write_bytes(data)
        assert Archive.read(run_dir, weights=True).problems
        path.write_bytes(len(data).to_bytes(8, "little") + data)
        assert Archive.read(run_dir, weights=True).problems
    finally:
        path.write_bytes(good)
