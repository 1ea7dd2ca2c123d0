from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.errors import LockError, RecipeError, RunError, StoppedError, VerificationError
from kitbuild.guest import determinism, failures, launch, manifest, preflight, record, settings
from kitbuild.guest.config import Config
from kitbuild.guest.verify import Verification
from kitbuild.recipe import strictness
from tests.guest.root import relist

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.guest.root import Root

REPOSITORY = Path(__file__).parents[2]
PLAIN: dict[str, Any] = {"kernels": {"attention": "sdpa", "layers": {}}}


def verify(root: Root, **environ: str) -> None:
    Verification(Config.read(root.environ | environ), environ).wait()


def test_locked_tree_is_verified(build: Callable[..., Root]) -> None:
    """A tree as it was locked is right, and every file of it was read."""
    root = build()
    verification = Verification(Config.read(root.environ), {})
    verification.wait()
    assert verification.files == sum(1 for path in root.path.rglob("*") if path.is_file()) - 1


@pytest.mark.parametrize(
    "name",
    [
        "inputs/tokenizer/tokenizer.json",
        "inputs/data/0/chats.jsonl",
        "opt/kit/lib/fake.py",
        f"kit/kernels/kernels--kernels-community--flash-attn2/snapshots/{'a' * 40}/build/torch-cpu/flash_attn.py",
    ],
)
def test_one_wrong_byte_is_found(build: Callable[..., Root], name: str) -> None:
    """A flipped byte of the right length is named, wherever it is."""
    root = build()
    path = root.path / name
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    with pytest.raises(VerificationError) as caught:
        verify(root)
    assert [problem.file for problem in caught.value.problems] == [f"/{name}"]
    assert "nothing was trained" in str(caught.value.hint)


def test_every_difference_at_once(build: Callable[..., Root]) -> None:
    """A missing file, a longer one, an extra one and an override are told together."""
    root = build()
    (root.path / "inputs/tokenizer/tokenizer.json").unlink()
    with (root.path / "inputs/data/0/chats.jsonl").open("a") as file:
        file.write("\n")
    (root.path / "opt/kit/lib/extra.py").write_text("")
    with pytest.raises(VerificationError) as caught:
        verify(root, LOCAL_KERNELS="a/b=/tmp/c")
    found = {problem.file or problem.key: problem.message for problem in caught.value.problems}
    assert set(found) == {
        "/inputs/tokenizer/tokenizer.json",
        "/inputs/data/0/chats.jsonl",
        "/opt/kit/lib/extra.py",
        "LOCAL_KERNELS",
    }
    assert found["/inputs/tokenizer/tokenizer.json"] == "is missing"
    assert found["/opt/kit/lib/extra.py"] == "is in no lock"


@pytest.mark.parametrize("name", ["tokenizer/added_tokens.json", "data/0/more/chats.jsonl"])
def test_extra_input_is_found(build: Callable[..., Root], name: str) -> None:
    """What a library would read beside the locked inputs is refused; a hidden file is nobody's input."""
    root = build()
    hidden = root.path / "inputs/tokenizer/.cache/note"
    hidden.parent.mkdir()
    hidden.write_text("")
    verify(root)
    extra = root.path / "inputs" / name
    extra.parent.mkdir(exist_ok=True)
    extra.write_text("{}")
    with pytest.raises(VerificationError) as caught:
        verify(root)
    assert [(problem.file, problem.message) for problem in caught.value.problems] == [
        (f"/inputs/{name}", "is in no lock")
    ]


def test_links_are_compared(build: Callable[..., Root]) -> None:
    """A link of the image that points elsewhere is a difference."""
    root = build()
    relist(root.path, links={"/opt/kit/bin/python": "/usr/bin/python3"})
    link = root.path / "opt/kit/bin/python"
    link.parent.mkdir()
    link.symlink_to("/usr/bin/python3")
    verify(root)
    link.unlink()
    link.symlink_to("/bin/sh")
    with pytest.raises(VerificationError) as caught:
        verify(root)
    assert caught.value.problems[0].message == "should link to /usr/bin/python3, not /bin/sh"


def test_missing_listing(build: Callable[..., Root]) -> None:
    """A locked environment without content.json is refused; one that is only recorded has none."""
    root = build()
    (root.path / "kit/content.json").unlink()
    with pytest.raises(VerificationError):
        verify(root)
    verify(root, KIT_LOCKED="0")


def test_edited_lock_is_refused(build: Callable[..., Root]) -> None:
    """A lock that is not the listed file is refused; listed or not, its content matches its own digest."""
    root = build()
    path = root.path / "kit/lock.json"
    raw = json.loads(path.read_bytes())
    path.write_text(json.dumps({**raw, "name": "other"}))
    with pytest.raises(VerificationError, match=r"/kit/lock\.json differs"):
        Config.read(root.environ)
    relist(root.path, "kit/lock.json")
    assert Config.read(root.environ).name == "other"
    raw["recipe"]["seed"] = 8
    path.write_text(json.dumps(raw))
    relist(root.path, "kit/lock.json")
    with pytest.raises(VerificationError, match=r"/kit/lock\.json was edited"):
        Config.read(root.environ)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "cannot be read"), ("[]", "it is no lock"), ('{"version": 2}', "has version 2")]
)
def test_unreadable_lock(build: Callable[..., Root], text: str, message: str) -> None:
    """A lock that is no lock, or of another version, is exit 3."""
    root = build()
    (root.path / "kit/lock.json").write_text(text)
    relist(root.path, "kit/lock.json")
    with pytest.raises(LockError, match=message):
        Config.read(root.environ)


def test_config_reads_what_the_lock_says(build: Callable[..., Root]) -> None:
    """Batch, attention and places come from the lock and the environment."""
    config = Config.read(build(batch={"global": 8, "micro": 2}).environ)
    assert (config.micro, config.accumulation, config.strict, config.cuda) == (2, 4, True, False)
    assert config.attention == "kernels-community/flash-attn2@" + "a" * 40
    assert [str(kernel) for kernel in config.kernels][
        1
    ] == "kernels-community/liger-kernels @ bbbbbbb, variant torch-cpu"


def test_environment_table(build: Callable[..., Root]) -> None:
    """Threads come from the lock; CUDA's settings are set for CUDA only; each has a reason and a source."""
    cpu = determinism.environment(Config.read(build(launch={"threads_per_process": 2}).environ))
    assert (cpu["OMP_NUM_THREADS"], cpu["MKL_NUM_THREADS"]) == ("2", "2")
    assert "CUBLAS_WORKSPACE_CONFIG" not in cpu
    assert cpu["LOCAL_KERNELS"] is None
    assert all(setting.reason and setting.source.startswith("https://") for setting in settings.TABLE)
    assert len({setting.name for setting in settings.TABLE}) == len(settings.TABLE)


@pytest.mark.parametrize(("track", "expected"), [([], None), (["wandb"], "offline")])
def test_trackers_write_files_only(track: list[str], expected: str | None, build: Callable[..., Root]) -> None:
    """Only a recipe that tracks hears of it: Transformers prints a line about wandb wherever the variable is set."""
    config = Config.read(build(track=track).environ)
    assert determinism.environment(config).get("WANDB_MODE") == expected


@pytest.mark.parametrize(("mode", "expected"), [("strict", ":4096:8"), ("record", None)])
def test_cuda_environment(build: Callable[..., Root], mode: str, expected: str | None) -> None:
    """Strict fixes cuBLAS's workspace; record leaves it."""
    config = Config.read(build(image={"cuda": "12.9"}, determinism=mode, **PLAIN).environ)
    assert determinism.environment(config).get("CUBLAS_WORKSPACE_CONFIG") == expected


def test_strict_refuses_by_name(build: Callable[..., Root]) -> None:
    """What strict cannot promise is told at once; record takes it."""
    train = {"auto_find_batch_size": True, "optim": "adamw_bnb_8bit", "max_steps": 1}
    with pytest.raises(RecipeError) as caught:
        determinism.refuse(Config.read(build(train=train).environ))
    assert [problem.key for problem in caught.value.problems] == ["train.auto_find_batch_size", "train.optim"]
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("loader", "refused"),
    [
        ({"num_workers": 0, "worker_init_fn": None}, False),
        ({"num_workers": 2, "worker_init_fn": print, "in_order": True}, False),
        ({"num_workers": 2, "worker_init_fn": None, "in_order": True}, True),
        ({"num_workers": 2, "worker_init_fn": print, "in_order": False}, True),
    ],
)
def test_workers_need_seeds_and_order(build: Callable[..., Root], loader: dict[str, Any], refused: bool) -> None:  # noqa: FBT001 - a case
    """Strict refuses data workers that have no seeds or hand over batches as they finish; record takes them."""
    given = SimpleNamespace(**loader)
    if refused:
        with pytest.raises(RecipeError, match="the data loader's workers have no seed or no order"):
            determinism.check_workers(Config.read(build().environ), given)
    else:
        determinism.check_workers(Config.read(build().environ), given)


def test_record_takes_any_workers(build: Callable[..., Root]) -> None:
    """Under record nobody asks."""
    config = Config.read(build(determinism="record").environ)
    determinism.check_workers(config, SimpleNamespace(num_workers=2, worker_init_fn=None))


@pytest.mark.parametrize(
    "optimizer", ["adamw_bnb_8bit", "adamw_8bit", "paged_adamw_32bit", "lion_32bit", "adamw_torch_4bit", "ademamix"]
)
def test_quantised_optimizers(build: Callable[..., Root], optimizer: str) -> None:
    """Strict refuses each optimizer of bitsandbytes and torchao, and takes PyTorch's own."""
    config = Config.read(build(train={"optim": optimizer, "max_steps": 1}).environ)
    assert [problem.key for problem in determinism.refusals(config)] == ["train.optim"]


@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "adamw_torch", "sgd", "adafactor"])
def test_other_optimizers(build: Callable[..., Root], optimizer: str) -> None:
    """What PyTorch and Transformers have themselves is taken."""
    config = Config.read(build(train={"optim": optimizer, "max_steps": 1}).environ)
    assert list(determinism.refusals(config)) == []


def test_guest_and_recipe_refuse_the_same_optimizers() -> None:
    """One pattern, in the guest for locks of any origin and in the recipe's rules for a located message."""
    assert settings.QUANTISED.pattern == strictness.QUANTISED.pattern


def test_record_refuses_nothing(build: Callable[..., Root]) -> None:
    """Under record the same settings are taken."""
    determinism.refuse(Config.read(build(train={"auto_find_batch_size": True}, determinism="record").environ))


def test_preflight_tells_every_problem(build: Callable[..., Root]) -> None:
    """No GPU for a CUDA target and a place that is none are told together, exit 6."""
    root = build(image={"cuda": "12.9"}, **PLAIN)
    (root.path.parent / "file").write_text("")
    config = Config.read({**root.environ, "KIT_OUT": str(root.path.parent / "file")})
    with pytest.raises(RunError) as caught:
        preflight.check(config, {})
    assert len(caught.value.problems) == 2
    assert "is not writable" in caught.value.problems[0].message
    assert "no NVIDIA driver answers" in caught.value.problems[1].message


def test_preflight_memory(build: Callable[..., Root], monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose weights, gradients and states do not fit is refused before it is loaded."""
    config = Config.read(build().environ)
    monkeypatch.setattr(preflight, "free_memory", lambda: 1000)
    with pytest.raises(RunError, match=r"training needs at least 0\.0 GiB of memory"):
        preflight.check(config, {})


@pytest.mark.parametrize(
    ("flags", "lacking"), [({"avx2", "fma"}, None), ({"fma"}, "avx2"), (set[str](), "avx2 and fma")]
)
def test_preflight_portable(
    build: Callable[..., Root], monkeypatch: pytest.MonkeyPatch, flags: set[str], lacking: str | None
) -> None:
    """cpu_portable on a processor that lacks its instructions is told before anything is imported."""
    monkeypatch.setattr(preflight, "cpu_flags", lambda: flags)
    config = Config.read(build(determinism={"mode": "strict", "cpu_portable": True}).environ)
    if lacking is None:
        preflight.check(config, {})
        return
    with pytest.raises(RunError, match=f"cpu_portable needs {lacking}, and this processor has none"):
        preflight.check(config, {})


def test_overlapped_communication(build: Callable[..., Root]) -> None:
    """A lock that has DeepSpeed overlap its communication is refused under strict, whoever wrote it."""
    config = Config.read(build().environ)
    arguments = config.raw["defaults"]["arguments"]
    for overlap, expected in ((False, []), (True, ["launch.strategy"])):
        arguments["deepspeed"] = {"value": {"zero_optimization": {"overlap_comm": overlap}}, "origin": "kitbuild"}
        assert [problem.key for problem in determinism.refusals(config)] == expected


def test_preflight_nodes(build: Callable[..., Root]) -> None:
    """Several nodes need to be told where the first is."""
    config = Config.read(build(launch={"nodes": 2}, **PLAIN).environ)
    with pytest.raises(RunError, match="2 nodes need MASTER_ADDR, MASTER_PORT, NODE_RANK"):
        preflight.check(config, {})


def test_fsdp_on_a_cpu_is_refused(build: Callable[..., Root]) -> None:
    """FSDP on a CPU would silently be DDP."""
    config = Config.read(build(launch={"strategy": "fsdp", "processes_per_node": 2}).environ)
    with pytest.raises(RunError, match="fsdp on a CPU is silently DDP"):
        preflight.check(config, {})


CPU = "ACCELERATE_DYNAMO_BACKEND=no ACCELERATE_MIXED_PRECISION=no"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"launch": {"threads_per_process": 3}},
            (
                "accelerate launch --num_machines 1 --num_processes 1 --num_cpu_threads_per_process 3"
                " --mixed_precision no --dynamo_backend no --cpu"
            ),
        ),
        (
            {"launch": {"processes_per_node": 2}},
            f"{CPU} ACCELERATE_USE_CPU=true torchrun --nnodes 1 --nproc-per-node 2",
        ),
        (
            {"launch": {"nodes": 2, "processes_per_node": 2, "strategy": "deepspeed"}},
            (
                f"{CPU} DS_ACCELERATOR=cpu torchrun --nnodes 2 --nproc-per-node 2"
                " --node-rank $NODE_RANK --master-addr $MASTER_ADDR --master-port $MASTER_PORT"
            ),
        ),
        (
            {"image": {"cuda": "12.9"}, "launch": {"nodes": 2, "strategy": "deepspeed", "zero_stage": 3}},
            (
                "accelerate launch --num_machines 2 --num_processes 2 --num_cpu_threads_per_process 1"
                " --mixed_precision no --dynamo_backend no --use_deepspeed --zero_stage 3"
                " --machine_rank $NODE_RANK --main_process_ip $MASTER_ADDR --main_process_port $MASTER_PORT"
            ),
        ),
    ],
)
def test_launcher_line(build: Callable[..., Root], changes: dict[str, Any], expected: str) -> None:
    """The printed line is the launch: Accelerate's, or torchrun's where Accelerate would start one process only."""
    config = Config.read(build(**PLAIN, **changes).environ)
    assert f"{expected} -m kitbuild.guest worker" == launch.command(config)


def test_first_error_wins(tmp_path: Path) -> None:
    """The error that a worker wrote first is the run's; a killed worker is told where none wrote."""
    assert "worker 1 was killed (SIGKILL)" in failures.first_error(tmp_path, {1: -9}, (0, 1), stopping=False).message
    for rank, when, code in ((0, 2.0, "run"), (1, 1.0, "verification")):
        told = {"code": code, "message": f"rank {rank}", "hint": None, "time": when}
        record.write_json(tmp_path / f"error-{rank}.json", told)
    found = failures.first_error(tmp_path, {0: 1, 1: 1}, (0, 1), stopping=False)
    assert (type(found), found.message) == (VerificationError, "rank 1")


def test_stop_before_training(tmp_path: Path) -> None:
    """A stop before the first step is told as that."""
    (tmp_path / "stop").write_text("SIGTERM")
    with pytest.raises(StoppedError, match="stopped in phase load, before the first step"):
        launch.Stop(tmp_path).check("load")


def test_metrics_are_cut_back(tmp_path: Path) -> None:
    """On resume, later steps and a torn line are dropped; floats are exact."""
    metrics = record.Metrics(tmp_path / "metrics.jsonl")
    metrics.start()
    for step in (1, 2, 3):
        metrics.append({"step": step, "loss": 0.1, "tokens": 5})
    with metrics.path.open("a") as file:
        file.write('{"step": 4, "lo')
    metrics.resume(2, metrics.path)
    assert record.read_metrics(metrics.path) == [
        {"step": step, "loss": "0x1.999999999999ap-4", "tokens": 5} for step in (1, 2)
    ]


def test_weight_digests_are_of_the_bytes(tmp_path: Path) -> None:
    """Each tensor's digest is of its bytes in the file."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0\0\0")
    assert manifest.weights(tmp_path) == {
        "a": {
            "dtype": "F32",
            "shape": [1],
            "sha256": "df3f619804a92fdb4057192dc43dd748ea778adc52bc498ce80524c014b81119",
        }
    }


def test_guest_needs_no_host_package(build: Callable[..., Root]) -> None:
    """Without any installed package, `kit info` works: the parent is the standard library's."""
    root = build()
    environ = {**root.environ, "PYTHONPATH": str(REPOSITORY), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-S", "-m", "kitbuild.guest", "info"], env=environ, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["attention"] == "kernels-community/flash-attn2@" + "a" * 40


def test_failure_leaves_a_record(build: Callable[..., Root]) -> None:
    """A failed verification leaves exit.json and manifest.json, and one line on stderr."""
    root = build()
    (root.path / "opt/kit/lib/fake.py").write_text("other")
    environ = {**root.environ, "PYTHONPATH": str(REPOSITORY), "PATH": os.environ["PATH"], "PYTHONHASHSEED": "0"}
    command = [
        sys.executable,
        "-S",
        "-c",
        "import sys; from kitbuild.guest import launch; launch.import_libraries = lambda config: None\nfrom kitbuild.guest.entry import main; sys.exit(main(['train']))",
    ]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    told = json.loads((root.out / "exit.json").read_bytes())
    assert (done.returncode, told["exit_code"], told["code"], told["phase"]) == (7, 7, "verification", "verify")
    assert "kit: error: 1 of " in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads((root.out / "manifest.json").read_bytes())["complete"] is False


@pytest.mark.parametrize("name", ["exit.json", "manifest.json"])
def test_a_run_is_not_written_over(name: str, build: Callable[..., Root]) -> None:
    """A `docker run` line that is pasted again: exit 6, and what was recorded stays byte for byte."""
    root = build()
    root.out.mkdir(exist_ok=True)
    (root.out / name).write_text("kept")
    environ = {**root.environ, "PYTHONPATH": str(REPOSITORY), "PATH": os.environ["PATH"], "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-S", "-m", "kitbuild.guest", "train"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 6
    assert f"{root.out} holds a run already (hint: use an empty directory that this user can write)" in done.stderr
    assert {path.name: path.read_text() for path in root.out.iterdir()} == {name: "kept"}


def test_answers_are_cut_after_they_are_compared() -> None:
    """The last message is what was asked; two long texts that differ at their ends are not the same answer."""
    from kitbuild.guest.evaluate import answered  # noqa: PLC0415

    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert answered(asked, " a\n", "a") == {"prompt": "u", "answer": "a", "expected": "a", "right": True}
    long = answered("p" * 300, "a" * 300, "a" * 301)
    assert [len(long[key]) for key in ("prompt", "answer", "expected")] == [200, 200, 200]
    assert long["right"] is False
    assert answered([], "a", "b")["prompt"] == ""


def test_cache_that_cannot_be_written(build: Callable[..., Root]) -> None:
    """A cache that is no directory is exit 6, told in exit.json where that can be written."""
    root = build()
    root.cache.rmdir()
    root.cache.write_text("")
    environ = {**root.environ, "PYTHONPATH": str(REPOSITORY), "PATH": os.environ["PATH"], "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-S", "-m", "kitbuild.guest", "train"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 6
    assert "is not writable: Not a directory" in json.loads((root.out / "exit.json").read_bytes())["message"]
