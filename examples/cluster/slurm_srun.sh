#!/usr/bin/env bash
# Slurm starts every rank, without another launcher:
#   sbatch examples/cluster/slurm_srun.sh examples/train_digits.py --algorithm bytegrad
#SBATCH --job-name=commlib
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
# With GPUs, one per rank: #SBATCH --gpus-per-node=2
set -euo pipefail

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) # jobs may share a node
export MASTER_ADDR MASTER_PORT OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
# export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0 # the interface that connects the nodes

# The variables of torch.distributed, from those that Slurm sets for each task.
# shellcheck disable=SC2016 # the tasks expand them
ranks='export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID; exec "$@"'
# If a rank fails, Slurm ends the others.
srun --kill-on-bad-exit=1 bash -c "$ranks" bash "${PYTHON:-python}" "$@"
