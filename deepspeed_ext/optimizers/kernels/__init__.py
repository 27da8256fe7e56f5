"""Element-wise update kernels: reference.py is the specification; triton_ops.py and cpu.py compute it in one pass."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from types import ModuleType

logger = logging.getLogger("deepspeed_ext")


@functools.cache
def kernels_for(device_type: str) -> ModuleType:
    """Returns the module whose adam, lion, sgd, momentum and apply_update run on tensors of a device type.

    Where no fused kernels exist this is reference.py; on a GPU without triton one warning says so, with the remedy.

    Args:
        device_type: of torch.device, such as "cpu", "cuda" or "xpu".
    """
    if device_type == "cpu":
        return importlib.import_module("deepspeed_ext.optimizers.kernels.cpu")
    if device_type in ("cuda", "xpu"):
        if importlib.util.find_spec("triton") is not None:
            return importlib.import_module("deepspeed_ext.optimizers.kernels.triton_ops")
        logger.warning("triton is not installed: optimizer steps run in plain torch, several times slower; install it")
    return importlib.import_module("deepspeed_ext.optimizers.kernels.reference")
