#!/bin/sh
# A training job that may share its GPU. Make the token once, on the login node: gpushare token my-training
# The name stays in your home; what Slurm sees is a random id. Without the comment the job has its GPU alone.
#SBATCH --job-name=train
#SBATCH --comment=gpushare:my-training,max=25%
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G
#SBATCH --time=04:00:00

srun python3 train.py
