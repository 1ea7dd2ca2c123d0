#!/bin/bash
# qwen3-8b-sft: 2 nodes × 2 GPU processes; lock fedcba987654, kitbuild 0.1.0
# On Slurm, without a container; made by `kitbuild render slurm`. Submit with sbatch.
#SBATCH --job-name=qwen3-8b-sft
#SBATCH --nodes=2
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

# Where the nodes meet: the first node's address, as Slurm itself reaches it, and a port of this job's own.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol show node --oneliner "$first" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT

# kitbuild lays the locked files out once below KITBUILD_HOME (a shared file system, or each node's own),
# and starts the same guest from them. Before submitting, where the nodes have no network:
#   kitbuild fetch recipes/qwen3-8b.yaml
# A job that is started again goes on with the run that has a checkpoint.
recipe="$SLURM_SUBMIT_DIR"/recipes/qwen3-8b.yaml
export out recipe
export KIT_CHECKPOINTS="$out/checkpoints" # one folder for all nodes
code=0
# shellcheck disable=SC2016
srun --nodes="$SLURM_NNODES" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 bash -euc '
    export NODE_RANK=$SLURM_NODEID
    node=$out/node-$SLURM_NODEID
    mkdir -p -- "$node"
    resume=()
    for mark in "$node"/*/checkpoints/checkpoint-*/kit.json; do
        [ ! -f "$mark" ] || resume=(--resume "${mark%/checkpoints/*}")
    done
    exec kitbuild run "$recipe" --engine local --out "$node" "${resume[@]}"
' || code=$?

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
