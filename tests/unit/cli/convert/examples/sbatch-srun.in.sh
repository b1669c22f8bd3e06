#!/bin/bash
#SBATCH -J resnet
#SBATCH -N 2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --mem-per-cpu=4G
#SBATCH --time=02:00:00
#SBATCH --mail-type=END

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=29500
export WORLD_SIZE=$(($SLURM_NNODES * $SLURM_NTASKS_PER_NODE))
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

if [ ! -d data ]; then
  python download.sh
fi
cp -r /home/me/data /scratch
srun --label --cpu-bind=none --container-image=nvcr.io#nvidia/pytorch:25.10-py3 python -u train.py --workers $SLURM_CPUS_PER_TASK
