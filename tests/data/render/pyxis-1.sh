#!/bin/bash
# qwen3-8b-sft: 1 node × 2 GPU processes; lock fedcba987654, kitbuild 0.1.0
# On Slurm, with pyxis and enroot; made by `kitbuild render slurm`. Submit with sbatch.
#SBATCH --job-name=qwen3-8b-sft
#SBATCH --nodes=1
# One task a node: kit starts the processes of its node.
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=2
# Other jobs on a node would change nothing in the results, only the speed.
##SBATCH --exclusive
##SBATCH --partition=NAME
##SBATCH --time=1-00:00:00
# SIGTERM 600 s before the time limit: a checkpoint is saved, and the exit code is 10.
#SBATCH --signal=TERM@600
# A limit must be longer than that. Preemption and scancel send SIGTERM too: the partition's GraceTime, and
# KillWait, must leave time for a step and a checkpoint.
# A job that was preempted, or whose node failed, goes on where its last checkpoint is.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

# The same directory each time that this job is started: a shared file system, where every node sees it.
out="$SLURM_SUBMIT_DIR"/runs/qwen3-8b-sft-"$SLURM_JOB_ID"
mkdir -p -- "$out"
# On the node's own disk: compiled kernels, and what /tmp is for. Removed at the end.
scratch=${TMPDIR:-/tmp}/kit-"$SLURM_JOB_ID"
# Model and data as `kitbuild fetch recipes/qwen3-8b.yaml --inputs DIR` lays them out.
# Every byte of them is verified at start.
inputs=/shared/inputs

# What the guest is told. Nothing else of this shell's environment reaches it.
export KIT_ENGINE=pyxis
export KIT_HARDENING='{"read_only_root": true}'
export KIT_LOCKED=1
export KIT_RESUME=auto
export KIT_IMAGE='{"manifest_digest": "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"}'
passed=KIT_ENGINE,KIT_HARDENING,KIT_LOCKED,KIT_RESUME,KIT_IMAGE
# Read-only but for its mounts; an unprivileged user namespace, with the user's own uid.
# By digest: enroot takes it in the place of a tag.
image='registry.example:5000#team/chat:sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef'
mounts=$out:/out,$scratch/cache:/cache,$scratch/tmp:/tmp
mounts+=,$inputs/model:/inputs/model:ro
mounts+=,$inputs/chat_template.jinja:/inputs/chat_template.jinja:ro
mounts+=,$inputs/data/0:/inputs/data/0:ro
srun --nodes="$SLURM_NNODES" --ntasks-per-node=1 mkdir -p -- "$scratch/cache" "$scratch/tmp"
code=0
srun --nodes="$SLURM_NNODES" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 --export="HOME,PATH,USER,$passed" \
    --container-image="$image" --container-readonly --no-container-mount-home --no-container-entrypoint \
    --container-mounts="$mounts" --container-workdir=/out \
    kit train || code=$?
srun --nodes="$SLURM_NNODES" --ntasks-per-node=1 rm -rf -- "$scratch"

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
