#!/bin/bash
#SBATCH --job-name=mula-100b-a7b
#SBATCH --nodes=32
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
# 32 nodes of 8 GPUs: PP 4 x EP 8.
#   DATA_FILE_LIST=/path/list.txt sbatch -A ACCOUNT examples/slurm/mula_100b_a7b.sh      from the root of the source tree
#   bash examples/slurm/mula_100b_a7b.sh --dry-run                                       shows what would run, anywhere
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/../..}" || exit
[ -f examples/slurm/environment.sh ] || { echo "error: $PWD is not the root of the source tree; submit the job from there" >&2; exit 2; }
source examples/slurm/environment.sh || exit
exec python -m megatron.optimus.launch --launcher srun --nodes "${SLURM_JOB_NUM_NODES:-32}" --nproc-per-node 8 \
    --max-restarts 5 --preset mula-100b-a7b --micro-batch-size 1 \
    --expert-model-parallel-size 8 --pipeline-model-parallel-size 4 \
    --run-dir runs/mula-100b-a7b "${knobs[@]}" "$@"
