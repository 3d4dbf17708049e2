#!/bin/bash
# One task for each line of tasks.txt:  sbatch --array=1-"$(wc -l < tasks.txt)" array.sh
#SBATCH --job-name=belay
#SBATCH --ntasks=1
#SBATCH --time=01:00:00
#SBATCH --signal=TERM@60
#SBATCH --requeue
#SBATCH --output=belay-%A_%a.out
set -u

task=$(sed -n "${SLURM_ARRAY_TASK_ID}p" tasks.txt)
if [ -z "$task" ]; then
	echo "tasks.txt has no line $SLURM_ARRAY_TASK_ID" >&2
	exit 2
fi

# srun makes it a step, and steps get the signal of --signal: belay then has
# 60 s for a teardown that takes at most 12.
code=0
srun belay exec --auto --timeout 50m -- "$task" || code=$?

# 75 is temporary: the same element again, at most three times.
if [ "$code" = 75 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ]; then
	scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
fi
exit "$code"
