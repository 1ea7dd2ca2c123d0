"""Names and paths that hold syntax: in each file they stay what they are, one word of a shell, one string of YAML."""

from __future__ import annotations

import os
import stat
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kitbuild.errors import UsageError
from kitbuild.render import ImageReference, render_compose, render_job, render_trainjob
from kitbuild.render.slurm import CONTAINERS
from tests.render.golden import DIGEST, IMAGE, job, slurm

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = (
    "a b",
    "a'b",
    'a"b',
    "a\\b",
    "$(touch pwned)",
    "`touch pwned`",
    "${HOME}",
    "$$x",
    "a; touch pwned #",
    "-rf",
    "*",
    "!event",
    "a & b | c > d",
    "no",
    "~root",
    "a: b",
    "- a",
    "{a}",
    "ünïcödé 名",
)
LINES = ("a\nb", "a\n#SBATCH --uid=0", "a\n  privileged: true", "x\r\ny", "x\u2028y", "x\x85y")
ANY = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20)
# In place of each program that a script starts: writes down how it was called, one argument a line.
RECORDER = """#!/bin/sh
{ printf '%s' "$(basename "$0")"; for word in "$@"; do printf '\\037%s' "$word"; done; printf '\\036'; } >>"$RECORD"
case $(basename "$0") in
scontrol) [ "$2" = hostnames ] && echo n0 || echo "NodeName=n0 NodeAddr=10.0.0.1 Port=1" ;;
srun)
    held=
    while [ $# -gt 0 ]; do
        case $1 in --container-image=*) held=container && shift ;; --*) shift ;; *) break ;; esac
    done
    case $held$1 in container* | mkdir | rm) ;; *) SLURM_NODEID=0 exec "$@" ;; esac ;;
esac
"""


def called(script: str, folder: Path, **environ: str) -> list[list[str]]:
    """Run a script with recorders in place of Slurm, Apptainer and kitbuild; each call as words."""
    tools, work = folder / "bin", folder / "work"
    tools.mkdir(exist_ok=True)
    work.mkdir(exist_ok=True)
    for name in ("srun", "scontrol", "apptainer", "kitbuild", "kit"):
        (tools / name).write_text(RECORDER)
        (tools / name).chmod(stat.S_IRWXU)
    record = folder / "record"
    record.write_bytes(b"")
    told = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n0", "SLURM_NNODES": "1", "SLURM_CPUS_PER_TASK": "2"}
    path = f"{tools}{os.pathsep}/usr/bin{os.pathsep}/bin"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=work,
        env={"PATH": path, "RECORD": str(record), "SLURM_SUBMIT_DIR": str(work), "HOME": "/root", **told, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not (work / "pwned").exists()
    return [call.split("\x1f") for call in record.read_bytes().decode().split("\x1e")[:-1]]


@pytest.mark.parametrize("text", [*HOSTILE, *LINES])
def test_plain_script_keeps_words(text: str, tmp_path: Path) -> None:
    """The recipe's path and the run directory reach kitbuild as they are, whatever they hold."""
    script = slurm(container="none", image=None, recipe=text, out=text, name=text)
    ran = called(script, tmp_path)[-1]
    folder = tmp_path / "work"
    assert ran[:5] == ["kitbuild", "run", f"{folder}/{text}", "--engine", "local"]
    assert ran[6].startswith(f"{folder}/{text}/")
    assert ran[6].endswith("-7/node-0")


@pytest.mark.parametrize("text", [text for text in HOSTILE if ":" not in text])
@pytest.mark.parametrize("nodes", [1, 2])
def test_container_scripts_keep_words(text: str, nodes: int, tmp_path: Path) -> None:
    """Mounts and the image reach Apptainer and pyxis whole, one word each."""
    where = {"nodes": nodes, "recipe": text, "inputs": text, "out": text, "name": text, "cuda": False}
    inputs = f"{tmp_path}/work/{text}"
    ran = called(slurm(container="apptainer", image=f"/{text}.sif", **where), tmp_path)[-2]
    assert ran[:2] == ["apptainer", "exec"]
    assert f"{inputs}/model:/inputs/model:ro" in ran
    assert ran[ran.index("--pwd") : ran.index("--pwd") + 3] == ["--pwd", "/out", f"/{text}.sif"]
    assert ran[-1].endswith("exec kit train" if nodes > 1 else "train")
    calls = called(slurm(container="pyxis", image=f"/{text}.sqsh", **where), tmp_path)
    (ran,) = (call for call in calls if f"--container-image=/{text}.sqsh" in call)
    (mounts,) = (word.removeprefix("--container-mounts=") for word in ran if word.startswith("--container-mounts="))
    assert f",{inputs}/model:/inputs/model:ro," in mounts
    assert ran[-1].endswith("exec kit train" if nodes > 1 else "train")


@pytest.mark.parametrize("container", ["pyxis", "apptainer"])
@pytest.mark.parametrize("text", ["a,b", "a:b", "a\nb"])
@pytest.mark.parametrize("name", ["inputs", "out"])
def test_unmountable_paths_are_refused(container: str, text: str, name: str) -> None:
    """What neither tool can mount is exit 2, not another mount."""
    with pytest.raises(UsageError, match=f"which {container} cannot mount"):
        slurm(container=container, **{name: text})


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("text", [*HOSTILE, *LINES])
def test_only_our_directives(container: str, text: str) -> None:
    """No name or path adds a line that sbatch reads as its own."""
    image = None if container == "none" else IMAGE
    script = slurm(container=container, image=image, name=text, recipe=text, cuda=True)
    head = script.split("set -euo pipefail")[0]
    assert [line.split("=")[0] for line in head.splitlines() if line.startswith("#SBATCH")] == [
        "#SBATCH --job-name",
        "#SBATCH --nodes",
        "#SBATCH --ntasks-per-node",
        "#SBATCH --cpus-per-task",
        "#SBATCH --gpus-per-node",
        "#SBATCH --signal",
        "#SBATCH --requeue",
        "#SBATCH --open-mode",
        "#SBATCH --output",
    ]


def interpolated(value: Any) -> Any:
    """As Compose does: `$$` is a `$`; what is left of `$` is a variable."""
    if isinstance(value, dict):
        return {key: interpolated(item) for key, item in value.items()}
    if isinstance(value, list):
        return [interpolated(item) for item in value]
    return value.replace("$$", "\0") if isinstance(value, str) else value


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(name=ANY, recipe=ANY, inputs=ANY, out=ANY)
def test_compose_keeps_strings(name: str, recipe: str, inputs: str, out: str) -> None:
    """Any path is one string, and no `$` in it a variable; nothing else of the file changes."""
    text = render_compose(job(nodes=2, name=name, recipe=recipe), image=IMAGE, inputs=inputs, out=out)
    services = interpolated(yaml.safe_load(text))["services"]
    assert list(services) == ["node-0", "node-1"]
    for rank, service in enumerate(services.values()):
        sources = [mount["source"].replace("\0", "$") for mount in service["volumes"]]
        assert sources[0].removeprefix("./") == f"{inputs}/model".removeprefix("./")
        wanted = [f"{out}/node-{rank}", f"{out}/checkpoints"]
        assert [source.removeprefix("./") for source in sources[-2:]] == [each.removeprefix("./") for each in wanted]
        assert "$" not in "".join(mount["source"] for mount in service["volumes"])
        assert service["read_only"] is True
        assert "privileged" not in service


@given(name=ANY, recipe=ANY, inputs=ANY, out=ANY)
def test_kubernetes_keeps_strings(name: str, recipe: str, inputs: str, out: str) -> None:
    """Any name gives the same objects, and claims that are one string."""
    found = job(name=name, recipe=recipe, nodes=2)
    for render, kinds in (
        (render_job, ["NetworkPolicy", "Service", "Job"]),
        (render_trainjob, ["NetworkPolicy", "TrainingRuntime", "TrainJob"]),
    ):
        text = render(found, image=IMAGE, inputs=inputs, out=out)
        values = list(yaml.safe_load_all(text))
        assert kinds == [value["kind"] for value in values]
        assert {found.label} == {value["metadata"]["name"] for value in values}
    job_claims = yaml.safe_load_all(render_job(found, image=IMAGE, inputs=inputs, out=out))
    volumes = {each["name"]: each for each in list(job_claims)[-1]["spec"]["template"]["spec"]["volumes"]}
    assert volumes["out"]["persistentVolumeClaim"]["claimName"] == out
    assert volumes["inputs"]["persistentVolumeClaim"]["claimName"] == inputs


def test_a_reference_has_no_syntax() -> None:
    """What a reference may hold needs no quoting anywhere."""
    assert str(ImageReference.parse(f"a.b:1/c_d-e@{DIGEST}")) == f"a.b:1/c_d-e@{DIGEST}"
