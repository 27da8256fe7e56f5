#!/bin/bash
#SBATCH --job-name=mula-220b-a10b
#SBATCH --nodes=64
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
# 64 nodes of 8 GPUs: PP 8 x EP 8.
#   DATA_FILE_LIST=/path/list.txt sbatch -A ACCOUNT examples/slurm/mula_220b_a10b.sh      from the root of the source tree
#   bash examples/slurm/mula_220b_a10b.sh --dry-run                                       shows what would run, anywhere
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/../..}" || exit
[ -f examples/slurm/environment.sh ] || { echo "error: $PWD is not the root of the source tree; submit the job from there" >&2; exit 2; }
source examples/slurm/environment.sh || exit
exec python -m megatron.optimus.launch --launcher srun --nodes "${SLURM_JOB_NUM_NODES:-64}" --nproc-per-node 8 \
    --max-restarts 5 --preset mula-220b-a10b --micro-batch-size 1 \
    --expert-model-parallel-size 8 --pipeline-model-parallel-size 8 \
    --run-dir runs/mula-220b-a10b "${knobs[@]}" "$@"
