"""``python -m megatron.optimus COMMAND``: the command ``optimus`` in a source tree that is not installed."""

import sys

from megatron.optimus.cli import main

if __name__ == "__main__":
    sys.exit(main())
