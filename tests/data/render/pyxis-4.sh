#!/bin/bash
# qwen3-8b-sft: 4 nodes × 8 GPU processes; lock fedcba987654, kitbuild 0.1.0
# On Slurm, with pyxis and enroot; made by `kitbuild render slurm`. Submit with sbatch.
#SBATCH --job-name=qwen3-8b-sft
#SBATCH --nodes=4
# One task a node: kit starts the processes of its node.
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=8
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

# Where the nodes meet: the first node's address, as Slurm itself reaches it, and a port of this job's own.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol show node --oneliner "$first" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT

# What the guest is told. Nothing else of this shell's environment reaches it.
export KIT_ENGINE=pyxis
export KIT_HARDENING='{"read_only_root": true}'
export KIT_LOCKED=1
export KIT_RESUME=auto
export KIT_IMAGE='{"manifest_digest": "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"}'
# NCCL_SOCKET_IFNAME and the like: export them here, and add their names.
passed=KIT_ENGINE,KIT_HARDENING,KIT_LOCKED,KIT_RESUME,KIT_IMAGE,MASTER_ADDR,MASTER_PORT
# Read-only but for its mounts; an unprivileged user namespace, with the user's own uid.
# By digest: enroot takes it in the place of a tag.
image='registry.example:5000#team/chat:sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef'
mounts=$out:/out,$scratch/cache:/cache,$scratch/tmp:/tmp
mounts+=,$inputs/model:/inputs/model:ro
mounts+=,$inputs/chat_template.jinja:/inputs/chat_template.jinja:ro
mounts+=,$inputs/data/0:/inputs/data/0:ro
srun --nodes="$SLURM_NNODES" --ntasks-per-node=1 mkdir -p -- "$scratch/cache" "$scratch/tmp"
code=0
# shellcheck disable=SC2016
srun --nodes="$SLURM_NNODES" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 --export="HOME,PATH,USER,$passed" \
    --container-image="$image" --container-readonly --no-container-mount-home --no-container-entrypoint \
    --container-mounts="$mounts" --container-workdir=/out \
    sh -c 'export NODE_RANK=$SLURM_NODEID; export KIT_OUT=/out/node-$NODE_RANK; mkdir -p /out/checkpoints $KIT_OUT; ln -sfn ../checkpoints $KIT_OUT/checkpoints; exec kit train' || code=$?
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
