"""Arguments of deepspeed_ext.initialize; the test of the same name on ranks builds whole engines."""

from __future__ import annotations

import pytest
from torch import nn

from deepspeed_ext.initialize import _torch_optimizer


def test_an_optimizer_by_name_is_refused_with_what_is_expected() -> None:
    with pytest.raises(ValueError, match=r"optimizer=.adamw.: expected a torch.optim.Optimizer.*section"):
        _torch_optimizer(nn.Linear(2, 2), "adamw", None, {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a function that returned 3, not a torch\.optim\.Optimizer"):
        _torch_optimizer(nn.Linear(2, 2), lambda params: 3, None, {})  # type: ignore[arg-type,return-value]
