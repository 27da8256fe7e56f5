"""Random numbers named by purpose, so that they do not depend on which rank draws them or in what order."""

from __future__ import annotations

import hashlib
import json

import torch


def generator_for(seed: int, *names: str | int) -> torch.Generator:
    """A CPU generator that depends on ``seed`` and ``names`` alone: the same weights on every layout and device.

    CPU because CUDA and XPU generators give other numbers. Its state follows from 32 bits (all that torch's CPU
    generator takes from a seed) of a sha256.
    """
    digest = hashlib.sha256(json.dumps([seed, *names]).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
