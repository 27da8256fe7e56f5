#!/bin/bash
#SBATCH --job-name=mula-20b-a2b
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
# 8 nodes of 8 GPUs: EP 8 inside the node.
#   DATA_FILE_LIST=/path/list.txt sbatch -A ACCOUNT examples/slurm/mula_20b_a2b.sh      from the root of the source tree
#   bash examples/slurm/mula_20b_a2b.sh --dry-run                                       shows what would run, anywhere
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/../..}" || exit
[ -f examples/slurm/environment.sh ] || { echo "error: $PWD is not the root of the source tree; submit the job from there" >&2; exit 2; }
source examples/slurm/environment.sh || exit
exec python -m megatron.optimus.launch --launcher srun --nodes "${SLURM_JOB_NUM_NODES:-8}" --nproc-per-node 8 \
    --max-restarts 5 --preset mula-20b-a2b --micro-batch-size 4 \
    --expert-model-parallel-size 8 \
    --run-dir runs/mula-20b-a2b "${knobs[@]}" "$@"
