#!/usr/bin/env bash
# Slurm starts torchrun once per node, which starts the node's ranks and restarts them after a failure:
#   sbatch examples/cluster/slurm_torchrun.sh examples/train_digits.py --algorithm bytegrad
#SBATCH --job-name=commlib
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=01:00:00
# With GPUs: #SBATCH --gpus-per-node=2
set -euo pipefail

ranks_per_node=2
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000)) # jobs may share a node
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / ranks_per_node))
# export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0 # the interface that connects the nodes

# --max-restarts needs a script that resumes: docs/how-to/integrations/torchrun.md
srun --kill-on-bad-exit=1 "${PYTHON:-python}" -m torch.distributed.run \
  --nnodes "$SLURM_NNODES" --nproc_per_node "$ranks_per_node" --max-restarts 0 \
  --rdzv-backend c10d --rdzv-endpoint "$head_node:$port" --rdzv-id "$SLURM_JOB_ID" "$@"
