# Sourced by the job scripts of this folder, from the root of the source tree.
if [ -f .venv/bin/activate ]; then
    source .venv/bin/activate
fi
# The job's knobs. Everything else is an option after the script's name: sbatch examples/slurm/mula_1b.sh --lr 2e-4
knobs=(${DATA_FILE_LIST:+--data-file-list "$DATA_FILE_LIST"} ${TOKENIZER_MODEL:+--tokenizer-model "$TOKENIZER_MODEL"})
