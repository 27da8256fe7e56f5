"""Model converters, which replace modules of the serial model before it is sharded (an fp8 linear layer, say).

Each module of this folder is one: ``--model-converters NAME`` applies its function ``convert``. To add one, write its
file; nothing else needs to know of it (docs/extending.md).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.models.decoder import Decoder

ModelConverter = Callable[[Decoder], None]


def load_converters(names: Sequence[str]) -> list[ModelConverter]:
    """Imports the converters that ``model_converters`` names, in its order.

    Args:
        names: modules of this folder.

    Returns:
        The function ``convert`` of each.

    Raises:
        ConfigError: the folder has no module of that name.
    """
    known = [module.name for module in pkgutil.iter_modules(__path__)]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"model_converters: {name!r} is none of those there are ({', '.join(known) or 'none'}); "
                "name a file of megatron/optimus/parallel/converters"
            )
    return [importlib.import_module(f"{__name__}.{name}").convert for name in names]
