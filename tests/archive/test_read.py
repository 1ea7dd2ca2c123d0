"""Reading and verifying archives: what is accepted, and the exact words for what is not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitbuild.archive import Archive, Exit, Kit, KitTar, Manifest, Metrics, check, read, verify
from kitbuild.archive.documents import parse_metrics
from kitbuild.archive.models import exact_float
from kitbuild.errors import LockError, UsageError, VerificationError
from tests.archive.factory import Run, metrics_line, safetensors, sha256

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return Run().write(tmp_path / "run")


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))


def messages(path: Path) -> list[str]:
    return [str(problem).replace(str(path), "RUN") for problem in verify(read(path))]


def test_a_good_run_verifies(run_dir: Path) -> None:
    """A run as the guest writes it has no problem, and its values are there."""
    archive = Archive.read(run_dir, weights=True)
    assert archive.problems == ()
    assert archive.finished
    assert archive.has_weights
    assert [line.step for line in archive.metrics] == [1, 2, 3, 4, 5]
    assert archive.manifest.lock.name == "tiny"
    check(archive)


def test_an_unknown_field_of_the_same_format_is_tolerated(run_dir: Path) -> None:
    """A later guest of the same format may record one more fact."""
    edit(run_dir / "manifest.json", lambda body: body.update(colour="blue") or body["device"].update(fans=2))
    assert messages(run_dir) == []


def test_what_was_not_known_at_a_stop_may_be_null(run_dir: Path) -> None:
    """A failed run writes null or nothing for what it did not reach."""
    unknown = ("device", "environment", "kernels", "results", "data", "weights", "image", "liger", "attention")
    edit(run_dir / "manifest.json", lambda body: body.update(dict.fromkeys(unknown), complete=False))
    (run_dir / "exit.json").write_text('{"exit_code": 6}')
    archive = read(run_dir)
    assert archive.problems == ()
    assert not archive.finished


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", 2, "RUN/manifest.json: format 2 is newer than this kitbuild reads (1)"),
        ("lock", {"version": 9, "kitbuild": {"version": "7.0"}}, "RUN/manifest.json: lock version 9 is newer than this kitbuild reads (1)"),
    ],
)  # fmt: skip
def test_a_newer_format_names_the_version_to_use(run_dir: Path, key: str, value: object, message: str) -> None:
    """A newer format is exit 3, and the hint names the kitbuild that wrote it."""
    edit(run_dir / "manifest.json", lambda body: body.update({key: value}))
    with pytest.raises(LockError) as caught:
        read(run_dir)
    assert caught.value.message.replace(str(run_dir), "RUN") == message
    assert caught.value.hint == f"use kitbuild {'7.0' if key == 'lock' else '0.1.0'}, which wrote it"
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "RUN/manifest.json is not JSON: Expecting value: line 1 column 1 (char 0)"),
        ("[]", "RUN/manifest.json is not a JSON object"),
        ('{"format": 1, "format": 1}', "RUN/manifest.json is not JSON: a key is given twice"),
        ("[" * 100_000, "RUN/manifest.json is not JSON: nested too deeply"),
        ('{"format": 0}', "RUN/manifest.json: format: Input should be 1"),
        ('{"format": "1"}', "RUN/manifest.json: format: Input should be 1"),
    ],
)
def test_a_malformed_manifest_is_refused(run_dir: Path, text: str, message: str) -> None:
    """What cannot be a manifest is exit 7."""
    (run_dir / "manifest.json").write_text(text)
    with pytest.raises(VerificationError) as caught:
        read(run_dir)
    assert caught.value.message.replace(str(run_dir), "RUN") == message
    assert caught.value.exit_code == 7


def test_a_manifest_that_is_not_text_is_refused(run_dir: Path) -> None:
    """Bytes that are not UTF-8 are exit 7, not a crash."""
    (run_dir / "manifest.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(VerificationError, match="is not JSON: 'utf-8' codec"):
        read(run_dir)


def test_wrong_fields_of_a_manifest_are_all_named(run_dir: Path) -> None:
    """Every wrong field is a problem with its key."""
    edit(run_dir / "manifest.json", lambda body: body.update(seed="many") or body["weights"].update(w={"dtype": 1}))
    with pytest.raises(VerificationError) as caught:
        read(run_dir)
    assert [problem.key for problem in caught.value.problems] == [
        "weights.w.dtype",
        "weights.w.shape",
        "weights.w.sha256",
        "seed",
    ]


@pytest.mark.parametrize("model", [Manifest, Metrics, Exit, Kit])
def test_each_field_is_documented(model: type[Any]) -> None:
    """docs/archive.md names every field of the manifest, of a step, of the exit, of a packed file."""
    text = (Path(__file__).parents[2] / "docs" / "archive.md").read_text(encoding="utf-8")
    fields = [field.name for field in dataclasses.fields(model)] if model is Kit else [*model.model_fields]
    assert [field for field in fields if f"`{field}`" not in text] == []


GOOD = metrics_line(3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not a JSON object: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[]", "Input should be a valid dictionary or instance of Metrics"),
        ("", "not a JSON object: Expecting value: line 1 column 1 (char 0)"),
        ({**GOOD, "loss": 3.0}, "loss: Input should be a valid string"),
        ({**GOOD, "loss": "3.0"}, "loss: '3.0' is not a float as float.hex() writes it"),
        ({**GOOD, "loss": "0x1.8p1"}, "loss: '0x1.8p1' is not a float as float.hex() writes it"),
        ({**GOOD, "loss": "0x1p99999"}, "loss: '0x1p99999' is not a float as float.hex() writes it"),
        ({**GOOD, "grad_norm": "NaN"}, "grad_norm: 'NaN' is not a float as float.hex() writes it"),
        ({**GOOD, "step": "3"}, "step: Input should be a valid integer"),
        ({**GOOD, "step": 0}, "step: Input should be greater than or equal to 1"),
        ({**GOOD, "tokens": -1}, "tokens: Input should be greater than or equal to 0"),
        ({**GOOD, "batch_sha256": "AB"}, "batch_sha256: String should match pattern '^[0-9a-f]{64}$'"),
        ({**GOOD, "colour": 1}, "colour: Extra inputs are not permitted"),
        ({key: GOOD[key] for key in GOOD if key != "loss"}, "loss: Field required"),
        ('{"step": 3, "step": 3}', "not a JSON object: a key is given twice"),
        ("x" * 1_100_000, "longer than 1048576 bytes"),
    ],
)
def test_a_malformed_line_of_metrics_is_located(run_dir: Path, line: object, message: str) -> None:
    """Each malformed line is a problem with its file and number, and the rest is still read."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    lines[2] = line if isinstance(line, str) else json.dumps(line)
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    first, *others = messages(run_dir)
    assert first == f"RUN/metrics.jsonl:3: {message}"
    assert others[0] == "RUN/metrics.jsonl:3: step 4 where step 3 was due"


@pytest.mark.parametrize("order", [[1, 2, 4, 5], [1, 2, 2, 3], [2, 3]])
def test_a_gap_or_a_repeat_in_the_steps_is_a_problem(tmp_path: Path, order: list[int]) -> None:
    """Steps count from 1 without a gap."""
    path = Run(steps=[metrics_line(step) for step in order]).write(tmp_path / "run")
    assert any("was due" in text for text in messages(path))


def test_a_line_cut_off_by_a_crash_is_flagged(tmp_path: Path) -> None:
    """A run that was killed while it wrote keeps its whole steps and is marked."""
    path = Run(exit=None).write(tmp_path / "run")
    (path / "manifest.json").unlink()
    with (path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 6, "lo')
    archive = read(path)
    assert archive.truncated
    assert len(archive.metrics) == 5
    assert not archive.finished
    assert messages(path) == ["RUN/manifest.json: missing: the run was killed or is not over"]


def test_a_cut_line_is_not_forgiven_in_a_complete_run(run_dir: Path) -> None:
    """A run that says it is complete has whole lines."""
    with (run_dir / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 6')
    assert messages(run_dir) == [
        "RUN/metrics.jsonl: the last line is cut off, but the manifest says complete",
    ]


def test_every_tampered_document_is_named(run_dir: Path) -> None:
    """Changes in recipe, lock and metrics are all reported at once, exit 7."""
    (run_dir / "recipe.yaml").write_text("kitbuild: 1\nname: other\n")
    lock_text = (run_dir / "lock.json").read_text()
    (run_dir / "lock.json").write_text(lock_text.replace('"2.13.0"', '"2.12.0"'))
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    lines[-1] = json.dumps(metrics_line(5, loss=(9.0).hex(), batch_sha256=sha256("other")))
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(VerificationError) as caught:
        check(read(run_dir))
    found = [(problem.file or "").rpartition("/")[2] + ":" + (problem.key or "") for problem in caught.value.problems]
    assert found == [
        "lock.json:",
        "lock.json:",
        "recipe.yaml:",
        "manifest.json:data.fingerprint",
        "manifest.json:results.loss_last",
    ]
    assert caught.value.message == f"{run_dir} does not verify: 5 problems"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"content_sha256": "0" * 64}, "RUN/manifest.json: content_sha256: is " + "0" * 64),
        ({"seed": 7}, "RUN/manifest.json: seed: is 7, the lock has 42"),
        ({"weights": {}}, "RUN/manifest.json: weights: no tensor is listed"),
        ({"results": {"steps": 9}}, "RUN/manifest.json: results.steps: is 9, the metrics give 5"),
        ({"lock_sha256": "0" * 64}, "RUN/lock.json: sha256 is "),
    ],
)
def test_a_manifest_that_contradicts_its_documents_is_named(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    """The manifest is held to the lock and to the metrics."""
    path = Run(manifest=change).write(tmp_path / "run")
    assert messages(path)[0].startswith(message)


@pytest.mark.parametrize("name", ["lock.json", "recipe.yaml", "exit.json"])
def test_a_missing_document_is_a_problem(run_dir: Path, name: str) -> None:
    """Each document of a complete run must be there."""
    (run_dir / name).unlink()
    assert [text.partition(",")[0] for text in messages(run_dir)] == [f"RUN/{name}: missing"]


def test_an_exit_code_contradicts_complete(run_dir: Path) -> None:
    """A complete run ended with 0."""
    (run_dir / "exit.json").write_text('{"exit_code": 6}')
    assert messages(run_dir) == ["RUN/exit.json: exit code 6, but the manifest says complete"]
    assert not read(run_dir).finished


def test_one_flipped_bit_of_the_weights_is_named_by_tensor(run_dir: Path) -> None:
    """The bytes of each tensor are hashed; the file's name and the tensor's are given."""
    path = run_dir / "model" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (text,) = messages(run_dir)
    assert text.startswith("RUN/model/model.safetensors: norm.weight: sha256 is ")
    assert read(run_dir).problems == ()


def test_weights_may_be_left_out(run_dir: Path) -> None:
    """Without model/ only the digests are there, which is enough for a verdict."""
    for item in (run_dir / "model").iterdir():
        item.unlink()
    (run_dir / "model").rmdir()
    assert messages(run_dir) == []
    assert not read(run_dir).has_weights


def test_a_model_without_its_weight_file_is_a_problem(run_dir: Path) -> None:
    """Where model/ is there, every tensor must be."""
    (run_dir / "model" / "model.safetensors").unlink()
    assert messages(run_dir) == ["RUN/model: embed.weight: is in no file", "RUN/model: norm.weight: is in no file"]


def test_shards_and_tied_names_are_understood(tmp_path: Path) -> None:
    """Tensors may lie in several files, and a tied weight may be listed under a name that no file has."""
    run = Run()
    head = run.weights["embed.weight"]
    path = Run(manifest={"weights": Run(weights={**run.weights, "head.weight": head}).body()["weights"]}).write(
        tmp_path / "run"
    )
    (path / "model" / "model.safetensors").unlink()
    for number, name in enumerate(run.weights):
        (path / "model" / f"model-{number}.safetensors").write_bytes(safetensors({name: run.weights[name]}))
    assert messages(path) == []


def test_an_extra_or_other_tensor_is_a_problem(run_dir: Path) -> None:
    """Unknown bytes, another type or shape and a repeated name are each named."""
    (run_dir / "model" / "model.safetensors").write_bytes(
        safetensors({"embed.weight": ("F32", [4], b"\1" * 16), "norm.weight": ("F16", [4], b"\2" * 8), "new": ("U8", [1], b"x")})
    )  # fmt: skip
    (run_dir / "model" / "second.safetensors").write_bytes(safetensors({"new": ("U8", [1], b"x")}))
    assert messages(run_dir) == [
        "RUN/model/second.safetensors: new: is also in model/model.safetensors",
        "RUN/model/model.safetensors: embed.weight: is F32 [4], the manifest says F32 [2, 2]",
        "RUN/model/model.safetensors: norm.weight: is F16 [4], the manifest says BF16 [4]",
        "RUN/model/second.safetensors: new: is not in the manifest",
    ]


@pytest.mark.parametrize("dtype", ["F32", "float32", "torch.float32"])
def test_a_type_may_be_named_as_torch_names_it(tmp_path: Path, dtype: str) -> None:
    """F32, float32 and torch.float32 are one type."""
    body = Run().body()["weights"]
    body["embed.weight"]["dtype"] = dtype
    assert messages(Run(manifest={"weights": body}).write(tmp_path / "run")) == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no safetensors header"),
        (b"\xff" * 16, "no safetensors header"),
        ((4).to_bytes(8, "little") + b"nope", "the safetensors header is not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "the safetensors header is not a table of tensors"),
        ((7).to_bytes(8, "little") + b'{"a":1}', "the safetensors header is not a table of tensors"),
        (safetensors({"a": ("F32", [1], b"1234")}) + b"more", "4 bytes after the last tensor"),
        (safetensors({"a": ("F32", [2], b"1234")}), "tensor a: its bytes 0-4 do not fit its shape, its neighbour or the file"),
        (safetensors({"a": ("F32", [1], b"1234")})[:-1], "tensor a: its bytes 0-4 do not fit its shape, its neighbour or the file"),
        (safetensors({"a": ("F99", [1], b"1234")}), "tensor a: bad dtype or shape"),
        (safetensors({"a": ("F32", [-1], b"1234")}), "tensor a: bad dtype or shape"),
    ],
)  # fmt: skip
def test_a_malformed_weight_file_is_a_problem(run_dir: Path, data: bytes, message: str) -> None:
    """Whatever a weight file holds, it is read within its bounds and reported."""
    (run_dir / "model" / "model.safetensors").write_bytes(data)
    assert messages(run_dir)[0] == f"RUN/model/model.safetensors: {message}"


def test_a_symbolic_link_is_not_followed(run_dir: Path, tmp_path: Path) -> None:
    """A document that leads out of the archive is refused."""
    secret = tmp_path / "secret"
    secret.write_text("{}")
    (run_dir / "exit.json").unlink()
    (run_dir / "exit.json").symlink_to(secret)
    with pytest.raises(VerificationError, match=r"exit\.json is a symbolic link"):
        read(run_dir)


@pytest.mark.parametrize("make", ["nothing", "empty"])
def test_what_is_no_run_is_a_usage_error(tmp_path: Path, make: str) -> None:
    """A path that does not exist, and a directory that is no run, are exit 2."""
    path = tmp_path / "x"
    if make == "empty":
        path.mkdir()
    with pytest.raises(UsageError) as caught:
        read(path)
    expected = {"nothing": f"{path} does not exist", "empty": f"{path} is not a run: it has no manifest.json"}
    assert caught.value.message == expected[make]


@pytest.mark.parametrize("content", [b"", b"kitbuild: 1\nname: tiny\n", b"\0" * 1024])
def test_a_file_that_is_no_tar_is_a_usage_error(tmp_path: Path, content: bytes) -> None:
    """A recipe in the place of a run is exit 2; a file that is called a packed run, and is not, is damaged: exit 7."""
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    for refuse in (read, KitTar.read):
        with pytest.raises(UsageError) as caught:
            refuse(path)
        assert caught.value.message == f"{path} is neither a run directory nor a .kit.tar"
        assert "name a run directory" in str(caught.value.hint)
    if content.startswith(b"kitbuild"):
        damaged = path.rename(tmp_path / "x.kit.tar")
        with pytest.raises(VerificationError, match=r"is not a \.kit\.tar"):
            read(damaged)


@given(st.floats())
def test_a_float_survives_the_file(value: float) -> None:
    """Every float goes through a line of metrics and comes back with the same bits."""
    line = json.dumps(metrics_line(1, loss=value.hex())).encode() + b"\n"
    (parsed,), problems, truncated = parse_metrics(line, file="m")
    assert (problems, truncated) == ((), False)
    assert parsed.loss == value.hex()
    assert exact_float(parsed.loss).hex() == value.hex()


@given(st.integers(min_value=0, max_value=600))
def test_a_cut_anywhere_loses_at_most_the_last_line(cut: int) -> None:
    """Whatever length a crash leaves, whole lines are kept and only the tail is flagged."""
    data = b"".join(json.dumps(metrics_line(step)).encode() + b"\n" for step in (1, 2))
    whole = data[: min(cut, len(data))]
    steps, problems, truncated = parse_metrics(whole, file="m")
    assert problems == ()
    assert len(steps) >= whole.count(b"\n")
    assert truncated == (len(steps) == whole.count(b"\n") and not whole.endswith(b"\n") and whole != b"")
