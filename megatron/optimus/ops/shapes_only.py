"""Tensors that have a shape and no values: on the meta device, FakeTensors, those of a compiler or a transform."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import is_fake
from torch.fx.experimental.proxy_tensor import get_proxy_mode


def lacks_values(tensor: Tensor) -> bool:
    """Whether only shapes are asked of what is computed from this tensor. A compiler or tracer asks for more: what it
    records from tensors without values runs on others later."""
    if torch.compiler.is_compiling():
        return False
    if type(tensor) is Tensor and not tensor.is_meta and not is_functorch_wrapped_tensor(tensor):
        return False  # as the next line finds, in a tenth of its time
    if not (tensor.is_meta or is_fake(tensor)):
        return False
    return get_proxy_mode() is None


def can_be_read(tensor: Tensor) -> bool:
    """Whether this tensor holds numbers itself, now, as parameters do and other subclasses that only add to Tensor: not
    so fake tensors, other wrappers, those of functorch, whose type is Tensor's own, and whatever a tracer sees."""
    if torch.compiler.is_compiling() or tensor.is_meta or is_functorch_wrapped_tensor(tensor) or get_proxy_mode():
        return False
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
