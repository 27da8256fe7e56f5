"""The older stacks that sites still load as modules: Intel's extension of torch, oneCCL's bindings and apex.

None of them is required. Intel's extension (IPEX) is imported at the start where it fits this torch, as its kernels
register themselves; oneCCL's bindings are imported for the backend ``ccl``; apex's norms and AdamW are taken where
``norm_backend`` and ``optimizer_backend`` ask for them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from typing import Any

import torch
import torch.distributed as dist

from megatron.optimus.platform.log import first_line

IPEX, CCL, APEX = "intel_extension_for_pytorch", "oneccl_bindings_for_pytorch", "apex"
_DISTRIBUTIONS = {IPEX: ("intel-extension-for-pytorch",), CCL: ("oneccl-bind-pt", "oneccl-bindings-for-pytorch")}


def version(module: str) -> str | None:
    """Returns a module's version without importing it; "unknown" where it does not say, None where it is absent."""
    for name in _DISTRIBUTIONS.get(module, (module,)):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        return None if importlib.util.find_spec(module) is None else "unknown"
    except (ImportError, ValueError):  # ValueError: a module that was made by hand has no spec
        return "unknown"


def ipex_error() -> str | None:
    """Returns why Intel's extension cannot be used with this torch; None if it can.

    It is for one version of torch, and ends the process that imports it with another.
    """
    found = version(IPEX)
    if found is None:
        return "it is not installed"
    own, needed = ([*text.split("."), ""][:2] for text in (torch.__version__, found))
    if found != "unknown" and own != needed:
        return f"it is for torch {'.'.join(needed)}, and this is torch {torch.__version__}"
    return None


@functools.cache
def load_ipex() -> str | None:
    """Imports Intel's extension where it is installed. Returns what the line at the start says of it; None: absent."""
    found = version(IPEX)
    if found is None:
        return None
    error = ipex_error()
    if error is None:
        try:
            importlib.import_module(IPEX)
        except (Exception, SystemExit) as failure:  # it raises whatever its libraries do, or ends the process
            error = f"it cannot be imported ({first_line(failure)[:200]})"
    name = f"intel-extension-for-pytorch {found}"
    return f"{name} (its kernels of cpu and xpu)" if error is None else f"{name} not used: {error}"


def ccl_error() -> str | None:
    """Registers the backend ``ccl`` of torch.distributed; returns why that is not possible, or None."""
    if "ccl" in dist.Backend.backend_list:
        return None
    if version(CCL) is None:
        return f"{CCL} is not installed: pip install oneccl_bind_pt in the version of this torch, or load its module"
    try:
        importlib.import_module(CCL)
    except (Exception, SystemExit) as failure:
        return f"{CCL} cannot be imported ({first_line(failure)[:200]})"
    return None if "ccl" in dist.Backend.backend_list else f"{CCL} {version(CCL)} does not register a backend ccl"


def apex_class(module: str, name: str) -> Any:
    """Returns a class of apex, such as "optimizers", "FusedAdam". Raises ImportError where it is absent."""
    found = version(APEX)
    if found is None:
        raise ImportError("apex is not installed; build it from its source with its CUDA extension, or load its module")
    try:
        return getattr(importlib.import_module(f"{APEX}.{module}"), name)
    except (Exception, SystemExit) as failure:
        raise ImportError(f"apex {found} has no {module}.{name} ({first_line(failure)[:200]})") from failure
