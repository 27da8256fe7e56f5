"""Random generators that depend on a seed and a name only, and the state of the process's global generators.

A named generator gives the same numbers on every rank, whatever was drawn before.
"""

from __future__ import annotations

import hashlib
import json
import random

import numpy as np
import torch


def generator_for(seed: int, *names: str | int) -> torch.Generator:
    """Returns a CPU generator that depends on ``seed`` and ``names`` only: the same weights on every layout and device.

    CPU because CUDA and XPU generators give other numbers. Its state follows from 32 bits (all that torch's CPU
    generator takes from a seed) of a sha256.
    """
    digest = hashlib.sha256(json.dumps([seed, *names]).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))


def seed_all(seed: int) -> None:
    """Seeds Python, numpy and torch on every device of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state(device: torch.device) -> torch.Tensor:
    """Returns the state of every random generator of this process, 1-D uint8; its length depends on the device type."""
    version, internal, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict) and numpy["bit_generator"] == "MT19937"
    words = [version, *internal, gauss is not None, numpy["state"]["pos"], numpy["has_gauss"]]
    words += numpy["state"]["key"].tolist()
    parts = [
        torch.tensor(words, dtype=torch.int64).view(torch.uint8),
        torch.tensor([gauss or 0.0, numpy["gauss"]], dtype=torch.float64).view(torch.uint8),
        torch.get_rng_state(),
    ]
    if device.type != "cpu":
        parts.append(torch.get_device_module(device).get_rng_state(device))
    return torch.cat(parts)


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    """Restores what ``rng_state`` returned on a process with the same type of device."""
    sizes = [8 * (1 + 625 + 3 + 624), 16, len(torch.get_rng_state())]
    first, second, cpu, own = state.cpu().split([*sizes, len(state) - sum(sizes)])
    version, *internal = first.clone().view(torch.int64).tolist()
    internal, (has_gauss, position, numpy_has_gauss), key = internal[:625], internal[625:628], internal[628:]
    gauss, numpy_gauss = second.clone().view(torch.float64).tolist()
    random.setstate((version, tuple(internal), gauss if has_gauss else None))
    np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), position, numpy_has_gauss, numpy_gauss))
    torch.set_rng_state(cpu.clone())
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(own.clone(), device)
