"""``python -m megatron.optimus COMMAND``: the command ``optimus`` in a source tree that is not installed."""

from megatron.optimus.cli import run

if __name__ == "__main__":
    run()
