"""An sbatch script: with pyxis/enroot, with apptainer, or with the same guest in a locked environment.

One task a node; kit starts the processes of its node. Nodes meet at the first one's address.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from kitbuild.errors import UsageError
from kitbuild.render.job import GRACE_SECONDS, hardened, one_line

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import PurePosixPath

    from kitbuild.render.job import Job
    from kitbuild.render.reference import ImageReference

CONTAINERS = ("pyxis", "apptainer", "none")
# Each is one field of a list with commas and colons, and neither tool knows a way to quote them.
_UNSAFE = re.compile(r"[,:\n]")


def render_slurm(job: Job, *, container: str, image: ImageReference | str | None, inputs: str, out: str) -> str:
    """The script. `image`: a reference by digest, or the path of a squashfs or SIF file; None without a container."""
    sections = [_head(job, container), _places(job, container, inputs, out)]
    if job.nodes > 1:
        sections.append(_RENDEZVOUS)
    if container == "none":
        sections += [_plain(job)]
    else:
        for name, value in (("--inputs", inputs), ("--out", out)):
            if _UNSAFE.search(value):
                raise UsageError(
                    f"{name} {value!r} has a comma, a colon or a line break, which {container} cannot mount",
                    hint="name another folder",
                )
        assert image is not None, "the caller resolves it"  # noqa: S101 - for us
        sections.append((_pyxis if container == "pyxis" else _apptainer)(job, image))
    return "\n".join([*sections, _ENDING])


def _head(job: Job, container: str) -> str:
    how = {"pyxis": "with pyxis and enroot", "apptainer": "with Apptainer", "none": "without a container"}[container]
    gpus = [f"#SBATCH --gpus-per-node={job.processes}"] if job.cuda else []
    lines = [
        "#!/bin/bash",
        f"# {job.title}",
        f"# On Slurm, {how}; made by `kitbuild render slurm`. Submit with sbatch.",
        f"#SBATCH --job-name={re.sub('[^A-Za-z0-9._-]', '_', job.name)}",
        f"#SBATCH --nodes={job.nodes}",
        "# One task a node: kit starts the processes of its node.",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --cpus-per-task={job.cores}",
        *gpus,
        "# Other jobs on a node would change nothing in the results, only the speed.",
        "##SBATCH --exclusive",
        "##SBATCH --partition=NAME",
        "##SBATCH --time=1-00:00:00",
        f"# SIGTERM {GRACE_SECONDS} s before the time limit: a checkpoint is saved, and the exit code is 10.",
        f"#SBATCH --signal=TERM@{GRACE_SECONDS}",
        "# A limit must be longer than that. Preemption and scancel send SIGTERM too: the partition's GraceTime, and",
        "# KillWait, must leave time for a step and a checkpoint.",
        "# A job that was preempted, or whose node failed, goes on where its last checkpoint is.",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=%x-%j.log",
        "set -euo pipefail",
        "",
    ]
    return "\n".join(lines)


def _places(job: Job, container: str, inputs: str, out: str) -> str:
    name = re.sub("[^A-Za-z0-9._-]", "_", job.name)
    lines = [
        "# The same directory each time that this job is started: a shared file system, where every node sees it.",
        f'out={_path(out)}/{name}-"$SLURM_JOB_ID"',
        'mkdir -p -- "$out"',
    ]
    if container != "none":
        lines += [
            "# On the node's own disk: compiled kernels, and what /tmp is for. Removed at the end.",
            'scratch=${TMPDIR:-/tmp}/kit-"$SLURM_JOB_ID"',
        ]
        if job.inputs:
            lines += [
                f"# Model and data as `kitbuild fetch {shlex.quote(one_line(job.recipe))} --inputs DIR` lays them out.",
                "# Every byte of them is verified at start.",
                f"inputs={_path(inputs)}",
            ]
    return "\n".join([*lines, ""])


def _path(text: str) -> str:
    """For a shell; a relative path is from where sbatch was called."""
    return shlex.quote(text) if text.startswith("/") else f'"$SLURM_SUBMIT_DIR"/{shlex.quote(text)}'


_RENDEZVOUS = """\
# Where the nodes meet: the first node's address, as Slurm itself reaches it, and a port of this job's own.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol show node --oneliner "$first" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT
"""

# Before a line that a task's own shell expands: a node's number is known in its task alone.
_OWN_FOLDER = (
    "export KIT_OUT=/out/node-$NODE_RANK; mkdir -p /out/checkpoints $KIT_OUT;"
    " ln -sfn ../checkpoints $KIT_OUT/checkpoints; exec kit train"
)
"""In the container: a run directory for each node, and one folder of checkpoints for all of them."""
_IN_TASK = "# shellcheck disable=SC2016"
# srun does not take the cores of a task from the job; and where one node has stopped, the others are left to stop.
_SRUN = 'srun --nodes="$SLURM_NNODES" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0'
_EACH_NODE = 'srun --nodes="$SLURM_NNODES" --ntasks-per-node=1'

_ENDING = """\
# 0: trained. 10: stopped, a checkpoint is saved. Anything else is an error, which kit has said above.
# Slurm queues a preempted job again only if it had to kill it; one that has saved its checkpoint asks for it here.
# KIT_REQUEUE=yes sbatch …: so does a job that its time limit has stopped. A plain scancel is for good in any case.
if [ "$code" -eq 10 ]; then
    preempted=$(scontrol show job --oneliner "$SLURM_JOB_ID" | grep -c ' PreemptTime=[0-9]' || true)
    if [ "$preempted" -gt 0 ] || [ "${KIT_REQUEUE:-no}" = yes ]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
exit "$code"
"""


def _settings(job: Job, environment: Mapping[str, str]) -> list[str]:
    """What the guest is told, and the names of it."""
    lines = ["# What the guest is told. Nothing else of this shell's environment reaches it."]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    names = [*environment, *(["MASTER_ADDR", "MASTER_PORT"] if job.nodes > 1 else [])]
    if job.nodes > 1:
        lines.append("# NCCL_SOCKET_IFNAME and the like: export them here, and add their names.")
    return [*lines, f"passed={','.join(names)}"]


def _pyxis(job: Job, image: ImageReference | str) -> str:
    environment = job.environment("pyxis", image=image, hardening={"read_only_root": True})
    guest = "kit train" if job.nodes == 1 else f"sh -c 'export NODE_RANK=$SLURM_NODEID; {_OWN_FOLDER}'"
    lines = _settings(job, environment)
    lines += [
        "# Read-only but for its mounts; an unprivileged user namespace, with the user's own uid.",
        *(["# By digest: enroot takes it in the place of a tag."] if not isinstance(image, str) else []),
        f"image={shlex.quote(image if isinstance(image, str) else image.enroot)}",
        "mounts=$out:/out,$scratch/cache:/cache,$scratch/tmp:/tmp",
        *(f"mounts+=,$inputs/{_below(place)}:{place}:ro" for place in job.inputs),
        f'{_EACH_NODE} mkdir -p -- "$scratch/cache" "$scratch/tmp"',
        "code=0",
        *([_IN_TASK] if job.nodes > 1 else []),
        f'{_SRUN} --export="HOME,PATH,USER,$passed" \\',
        '    --container-image="$image" --container-readonly --no-container-mount-home --no-container-entrypoint \\',
        '    --container-mounts="$mounts" --container-workdir=/out \\',
        f"    {guest} || code=$?",
        f'{_EACH_NODE} rm -rf -- "$scratch"',
        "",
    ]
    return "\n".join(lines)


def _apptainer(job: Job, image: ImageReference | str) -> str:
    network = "none" if job.nodes == 1 else "host"
    environment = job.environment("apptainer", image=image, hardening={**hardened(network), "cap_drop": "user"})
    lines = _settings(job, environment)
    if isinstance(image, str):
        lines += [f"image={shlex.quote(image)}"]
    else:
        sif = f"{job.label}-{str(image.digest).removeprefix('sha256:')[:12]}.sif"
        lines += [
            "# By digest, converted once; a SIF file on the shared file system serves all nodes.",
            f'image="$SLURM_SUBMIT_DIR"/{sif}',
            f'[ -f "$image" ] || apptainer pull "$image" {shlex.quote(f"docker://{image}")}',
        ]
    words = ["--containall", "--no-home", "--no-privs", *(["--nv"] if job.cuda else [])]
    words += ["--net", "--network", "none"] if job.nodes == 1 else []
    rank = "sh -c 'export APPTAINERENV_NODE_RANK=$SLURM_NODEID; exec \"$@\"' sh " if job.nodes > 1 else ""
    guest = "kit train" if job.nodes == 1 else f"sh -c '{_OWN_FOLDER}'"
    what = "no network" if job.nodes == 1 else "the host's network, where the nodes meet"
    lines += [
        f"# Read-only but for its mounts, no new privileges, no home directory, {what}.",
        "# /dev/shm is the host's: Apptainer's own is too small for data loaders and NCCL.",
        'binds=(--bind "$out:/out" --bind "$scratch/cache:/cache" --bind "$scratch/tmp:/tmp" --bind /dev/shm)',
        *(f'binds+=(--bind "$inputs/{_below(place)}:{place}:ro")' for place in job.inputs),
        "for name in ${passed//,/ }; do",
        '    export "APPTAINERENV_$name=${!name}"',
        "done",
        f'{_EACH_NODE} mkdir -p -- "$scratch/cache" "$scratch/tmp"',
        "code=0",
        *([_IN_TASK] if job.nodes > 1 else []),
        f"{_SRUN} \\",
        f'    {rank}apptainer exec {" ".join(words)} "${{binds[@]}}" --pwd /out "$image" {guest} || code=$?',
        f'{_EACH_NODE} rm -rf -- "$scratch"',
        "",
    ]
    return "\n".join(lines)


def _below(place: PurePosixPath) -> str:
    return place.relative_to("/inputs").as_posix()


def _plain(job: Job) -> str:
    """`kitbuild run --engine local` on each node."""
    lines = [
        "# kitbuild lays the locked files out once below KITBUILD_HOME (a shared file system, or each node's own),",
        "# and starts the same guest from them. Before submitting, where the nodes have no network:",
        f"#   kitbuild fetch {shlex.quote(one_line(job.recipe))}",
        "# A job that is started again goes on with the run that has a checkpoint.",
        f"recipe={_path(job.recipe)}",
        "export out recipe",
        *(['export KIT_CHECKPOINTS="$out/checkpoints" # one folder for all nodes'] if job.nodes > 1 else []),
        "code=0",
        _IN_TASK,
        f"{_SRUN} bash -euc '",
        "    export NODE_RANK=$SLURM_NODEID",
        "    node=$out/node-$SLURM_NODEID",
        '    mkdir -p -- "$node"',
        "    resume=()",
        '    for mark in "$node"/*/checkpoints/checkpoint-*/kit.json; do',
        '        [ ! -f "$mark" ] || resume=(--resume "${mark%/checkpoints/*}")',
        "    done",
        '    exec kitbuild run "$recipe" --engine local --out "$node" "${resume[@]}"',
        "' || code=$?",
        "",
    ]
    return "\n".join(lines)
