"""Model converters, which replace modules of the serial model before it is sharded (an fp8 linear layer, say).

Each module of this folder is one: ``--model-converters NAME`` applies its function ``convert``. To add one, write its
file; nothing else needs to know of it (docs/extending.md).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from megatron.optimus.models.decoder import Decoder

ModelConverter = Callable[[Decoder], None]


def load_converters(names: Sequence[str]) -> list[ModelConverter]:
    """Imports the converters that ``model_converters`` names, in its order.

    Args:
        names: modules of this folder, as config/schema.py has checked.

    Returns:
        The function ``convert`` of each.
    """
    return [importlib.import_module(f"{__name__}.{name}").convert for name in names]
