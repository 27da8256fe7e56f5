#!/bin/bash
# One machine with 8 GPUs.
#   bash examples/local/mula_7b_a1b.sh --data-path data/corpus_text_document --tokenizer-model tokenizer
#   bash examples/local/mula_7b_a1b.sh --dry-run
cd "$(dirname "$0")/../.." || exit
[ -d examples/local ] || { echo "error: $PWD is not the root of the source tree; start $0 where it lies" >&2; exit 2; }
exec python -m megatron.optimus.launch --nproc-per-node 8 --preset mula-7b-a1b \
    --micro-batch-size 8 --run-dir runs/mula-7b-a1b "$@"
