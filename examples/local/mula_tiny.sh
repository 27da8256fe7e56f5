#!/bin/bash
# One machine with 2 CPU cores, or 2 GPUs.
#   bash examples/local/mula_tiny.sh --data-path data/corpus_text_document --tokenizer-model tokenizer
#   bash examples/local/mula_tiny.sh --dry-run
cd "$(dirname "$0")/../.." || exit
[ -d examples/local ] || { echo "error: $PWD is not the root of the source tree; start $0 where it lies" >&2; exit 2; }
exec python -m megatron.optimus.launch --nproc-per-node 2 --preset mula-tiny \
    --expert-model-parallel-size 2 --run-dir runs/mula-tiny "$@"
