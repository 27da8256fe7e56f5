"""Imports DeepSpeed without MLflow, which its autotuner would import wherever it is installed.

Nothing here tunes, and MLflow takes as long as DeepSpeed itself: two seconds of every process that starts. A program
that has imported MLflow before keeps it; one that imports it later gets it.
"""

import sys

_is_hidden = "mlflow" not in sys.modules
if _is_hidden:
    sys.modules["mlflow"] = None  # type: ignore[assignment]  # an import of it raises ImportError
try:
    import deepspeed  # noqa: F401
finally:
    if _is_hidden:
        del sys.modules["mlflow"]
