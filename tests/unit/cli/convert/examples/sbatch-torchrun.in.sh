#!/bin/bash
#SBATCH --job-name=multinode_example
#SBATCH --nodes=4
#SBATCH --ntasks=4
#SBATCH --gres=gpu:a100:8
#SBATCH --cpus-per-task=16  # for the loader
#SBATCH --mem=64G
#SBATCH --time=1-12:30:00
#SBATCH -p gpu
#SBATCH -o logs/%j.out
#SBATCH --signal=B:USR1@120

set -euo pipefail
module load cuda/12.4
source venv/bin/activate

nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )
nodes_array=($nodes)
head_node=${nodes_array[0]}
head_node_ip=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)

echo Node IP: $head_node_ip
export LOGLEVEL=INFO
export MASTER_PORT=$(expr 10000 + $(echo -n $SLURM_JOBID | tail -c 4))
export DATA="/data/imagenet"
cd /src

srun torchrun \
  --nnodes $SLURM_NNODES \
  --nproc_per_node 8 \
  --rdzv_id $RANDOM \
  --rdzv_backend c10d \
  --rdzv_endpoint $head_node_ip:29500 \
  train.py --data "$DATA" --epochs 50 # the training
