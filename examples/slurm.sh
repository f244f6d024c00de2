#!/bin/bash
# A job that goes on by itself, exactly where it was, before its time limit and after a preemption:
#     sbatch examples/slurm.sh python train.py
# docs/checkpoints.md (SLURM) says what train.py needs for that, and what each line below is for. Options of the command line come first:
#     sbatch --nodes=4 --time=8:00:00 examples/slurm.sh python train.py
#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=SIGUSR1@90
#SBATCH --requeue
#SBATCH --open-mode=append
srun --kill-on-bad-exit=1 "$@"
