"""The guest writes and the host reads without sharing code: here the two are held to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kitbuild.archive import read, verify
from kitbuild.archive.checks import data_fingerprint
from kitbuild.archive.documents import parse_metrics
from kitbuild.archive.models import Tensor
from kitbuild.compare import compare
from kitbuild.guest import manifest, record
from tests.archive.factory import Run, default_weights, metrics_line, safetensors, sha256

if TYPE_CHECKING:
    from pathlib import Path


def test_both_sides_take_the_same_fingerprint() -> None:
    """Of no batch, of one, of several."""
    for count in (0, 1, 3):
        batches = [sha256(str(number)) for number in range(count)]
        assert manifest.fingerprint(batches) == data_fingerprint(batches)


def test_a_line_that_the_guest_appends_is_read(tmp_path: Path) -> None:
    """Floats as numbers in, exact hex strings out, NaN included."""
    metrics = record.Metrics(tmp_path / "metrics.jsonl")
    metrics.start()
    for step, loss in enumerate((0.1, float("nan"), float("inf"), -0.0), start=1):
        metrics.append({**metrics_line(step), "loss": loss, "grad_norm": 1.0, "learning_rate": 1e-5, "seconds": 0.5})
    steps, problems, truncated = parse_metrics((tmp_path / "metrics.jsonl").read_bytes(), file="m")
    assert [line.loss for line in steps] == [(0.1).hex(), "nan", "inf", "-0x0.0p+0"]
    assert (problems, truncated) == ((), False)


def test_an_edited_step_does_not_verify(tmp_path: Path) -> None:
    """A loss that was edited in a middle step does not verify, so there is nothing to compare."""
    whole = Run().write(tmp_path / "whole")
    run = Run()
    run.manifest = {
        "results": run.body()["results"] | {"metrics_sha256": manifest.metrics_digest(whole / "metrics.jsonl")}
    }
    edited = run.write(tmp_path / "edited")
    assert verify(read(edited)) == ()
    text = (edited / "metrics.jsonl").read_text()
    (edited / "metrics.jsonl").write_text(text.replace((3.0 - 3 / 8).hex(), (3.0).hex()))
    (problem,) = verify(read(edited))
    assert "metrics.jsonl: sha256 is" in str(problem)
    verdict = compare(read(whole), read(edited, weights=True))
    assert (verdict.verdict, verdict.exit_code, verdict.first_difference) == ("NOT_COMPARABLE", 9, None)
    assert verdict.detail == f"edited does not verify: {problem}"
    assert manifest.metrics_digest(tmp_path / "none") is None


def test_runs_that_verify_and_differ_in_the_middle_are_different(tmp_path: Path) -> None:
    """Each has the digest of its own metrics, so the step is told."""
    sides = []
    for name, loss in (("left", 2.5), ("right", 3.0)):
        run = Run()
        run.change_step(3, loss=loss.hex())
        digest = manifest.metrics_digest(run.write(tmp_path / "draft" / name) / "metrics.jsonl")
        run.manifest = {"results": run.body()["results"] | {"metrics_sha256": digest}}
        sides.append(read(run.write(tmp_path / name), weights=True))
    verdict = compare(sides[0], sides[1])
    assert (verdict.verdict, verdict.first_difference and verdict.first_difference.step) == ("DIFFERENT", 3)


def test_both_sides_take_the_same_tensor_digests(tmp_path: Path) -> None:
    """Type, shape and digest of each tensor as the guest reads them from the file."""
    (tmp_path / "model.safetensors").write_bytes(safetensors(default_weights()))
    found = {name: Tensor.model_validate(facts) for name, facts in manifest.weights(tmp_path).items()}
    expected = {
        name: Tensor(dtype=dtype, shape=tuple(shape), sha256=sha256(data))
        for name, (dtype, shape, data) in default_weights().items()
    }
    assert found == expected
