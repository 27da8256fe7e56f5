"""Storage of optimizer states in fp32, bf16 or 8 bits; the specification of what the kernels do.

Within a step bf16 and int8 states are rounded stochastically. Rounded to nearest, a second moment under beta2 = 0.999
could not decay: one step changes it by less than half of the spacing of values. The random bits are a hash of the
element's position in the shard and of the step number, so the same run gives the same bits.

bf16 takes 2 bytes an element. int8 takes 1 byte, and 4 bytes for every BLOCK elements: their scale, which is their
largest magnitude. An 8-bit code is a small float: with y = |x| / scale and an offset c = 2^-k it is the distance
between the bit patterns of y + c and c, cut to 3 mantissa bits. Codes are evenly spaced near zero and at most 1/8 apart
above c; zero and the maximum of a block are exact. Signed states use k = 15 (smallest step 2^-18 of the maximum).
Unsigned ones use k = 31 (2^-34), and a positive value never becomes zero: an update divided by the root of a second
moment of zero would be huge.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache

import torch
from torch import Tensor

BLOCK = 256  # elements with a common scale
MANTISSA_BITS = 3
SHIFT = 23 - MANTISSA_BITS  # fp32 has 23
SIGNED_EXPONENTS = 15  # codes -120 .. 120
UNSIGNED_EXPONENTS = 31  # codes 0 .. 248
SMALLEST_SCALE = 1e-30  # a block whose largest magnitude is below is stored as zeros: its inverse must stay finite
SCALE_SUFFIX = ".scale"
STAGING_BYTES = 64 << 20  # most device memory that StoredState takes beside the states
_ENCODING_BYTES = 32  # of temporaries for each element that is encoded


class StateDtype(Enum):
    """Storage of moments. Bytes per element and moment: 4, 2, 1 + 4 / BLOCK."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"

    @classmethod
    def parse(cls, value: str | StateDtype) -> StateDtype:
        """Parses ``state_dtype`` of a parameter group. Raises ValueError for an unknown one."""
        try:
            return cls(value)
        except ValueError:
            raise ValueError(f"state_dtype={value!r} is unknown; use fp32, bf16 or int8") from None


def num_blocks(numel: int) -> int:
    """Counts the blocks of ``numel`` elements, the last one partial."""
    return -(-numel // BLOCK)


def zeros(kind: str, like: Tensor, dtype: StateDtype, *, signed: bool = True) -> dict[str, Tensor]:
    """Creates a zero state.

    Args:
        kind: name of the state.
        like: gives length n and device.
        dtype: storage.
        signed: whether the state can be negative.

    Returns:
        The tensor [n] under ``kind``, and for int8 its fp32 scales [ceil(n / BLOCK)] under "<kind>.scale".
    """
    if dtype is StateDtype.FP32:
        return {kind: torch.zeros_like(like, dtype=torch.float32)}
    if dtype is StateDtype.BF16:
        return {kind: torch.zeros_like(like, dtype=torch.bfloat16)}
    return {
        kind: torch.zeros_like(like, dtype=torch.int8 if signed else torch.uint8),
        kind + SCALE_SUFFIX: torch.zeros(num_blocks(like.numel()), dtype=torch.float32, device=like.device),
    }


def read(state: dict[str, Tensor], kind: str) -> Tensor:
    """Returns a state as fp32 [n]: the live tensor if it is kept in fp32, else a decoded copy."""
    stored = state[kind]
    if stored.dtype in (torch.int8, torch.uint8):
        return decode(stored, state[kind + SCALE_SUFFIX])
    return stored.float()


def write(state: dict[str, Tensor], kind: str, value: Tensor) -> None:
    """Stores fp32 [n], rounded to nearest if the state is kept in fewer bits. Raises ValueError for another shape."""
    stored = state[kind]
    if value.shape != stored.shape:
        raise ValueError(f"state {kind!r} has shape {tuple(stored.shape)}, not {tuple(value.shape)}")
    if stored.dtype in (torch.int8, torch.uint8):
        codes, scale = encode(value, signed=stored.dtype == torch.int8)
        stored.copy_(codes)
        state[kind + SCALE_SUFFIX].copy_(scale)
    elif value.data_ptr() != stored.data_ptr():
        stored.copy_(value)


@dataclass(frozen=True)
class StoredState:
    """A range of a state that is kept in fewer than 32 bits: live views of what the optimizer keeps.

    It is read and written a little at a time, so that beside the states a device needs no more than STAGING_BYTES.

    Attributes:
        values: bf16 [n], or int8 or uint8 codes [n].
        scale: fp32, of every block that the codes lie in; None for bf16.
        table: fp32 [256] on the host, what each code (its bits as uint8) means at scale 1; None for bf16.
        first: number of the first element in its block.
    """

    values: Tensor
    scale: Tensor | None = None
    table: Tensor | None = None
    first: int = 0

    def part(self, start: int, stop: int) -> StoredState:
        """Returns elements [start, stop) of the range."""
        if self.scale is None:
            return StoredState(self.values[start:stop])
        low, high = self.first + start, self.first + stop
        scale = self.scale[low // BLOCK : num_blocks(high)]
        return StoredState(self.values[start:stop], scale, self.table, low % BLOCK)

    def moved(self, values: Tensor, scale: Tensor | None, first: int | None = None) -> StoredState:
        """Returns the same range with a copy of its tensors, or with those of a range whose ``first`` is given."""
        return StoredState(values, scale, self.table, self.first if first is None else first)

    def read(self) -> Tensor:
        """Returns the range as fp32 [n] in host memory."""
        result = torch.empty(len(self.values), dtype=torch.float32)
        for start, stop in self._steps():
            part = self.part(start, stop)
            values, target = part.values.cpu(), result[start:stop]
            if part.scale is None or self.table is None:
                target.copy_(values)
                continue
            torch.index_select(self.table, 0, values.view(torch.uint8).int(), out=target)
            target.mul_(part.scale.cpu().repeat_interleave(BLOCK)[part.first : part.first + len(target)])
        return result

    @torch.no_grad()
    def write(self, value: Tensor) -> None:
        """Stores fp32 [n] from any device, rounded to nearest. Codes must begin with a block and fill or end it."""
        for start, stop in self._steps():
            part, chunk = self.part(start, stop), value[start:stop].to(self.values.device)
            if part.scale is None:
                part.values.copy_(chunk)
            else:
                codes, scale = encode(chunk, signed=self.values.dtype == torch.int8)
                part.values.copy_(codes)
                part.scale.copy_(scale)

    def _steps(self) -> Iterator[tuple[int, int]]:
        step = STAGING_BYTES // _ENCODING_BYTES // BLOCK * BLOCK
        for start in range(0, len(self.values), step):
            yield start, min(start + step, len(self.values))


def stored_part(state: dict[str, Tensor], kind: str, where: slice) -> Tensor | StoredState:
    """Returns a range of a state: a live view if it is kept in fp32, else a StoredState."""
    stored = state[kind]
    if stored.dtype == torch.float32:
        return stored[where]
    if stored.dtype not in (torch.int8, torch.uint8):
        return StoredState(stored[where])
    table = _table(stored.dtype, stored.device)
    return StoredState(stored, state[kind + SCALE_SUFFIX], table).part(where.start, where.stop)


@cache
def _table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """What ``device`` decodes each code to at scale 1, by its bits as uint8: devices round a division differently."""
    codes = torch.arange(256, device=device).to(torch.uint8).view(dtype)
    return decode(codes, torch.ones(num_blocks(256), device=device)).cpu()


def _offset_bits(signed: bool) -> tuple[float, int]:
    exponents = SIGNED_EXPONENTS if signed else UNSIGNED_EXPONENTS
    return 2.0**-exponents, (127 - exponents) << 23


def encode(value: Tensor, *, signed: bool, bits: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Encodes fp32 values in 8 bits.

    Args:
        value: fp32 [n].
        signed: False for values >= 0 only.
        bits: int64 [n], 16 random bits for each element: rounds stochastically. None: rounds to the nearest code;
            encoding what ``decode`` returned then gives the same codes.

    Returns:
        int8 or uint8 codes [n], and fp32 scales [ceil(n / BLOCK)].
    """
    offset, offset_bits = _offset_bits(signed)
    padding = (0, -value.numel() % BLOCK)
    padded = torch.nn.functional.pad(value.float(), padding).view(-1, BLOCK)
    magnitude = padded.abs()
    scale = magnitude.amax(dim=1)
    scale = torch.where(scale >= SMALLEST_SCALE, scale, 0.0)
    y = torch.where(scale > 0, magnitude.T / scale, 0.0).T.contiguous()
    rounding: Tensor | int = 1 << (SHIFT - 1)
    if bits is not None:
        rounding = torch.nn.functional.pad(bits.to(torch.int32) << (SHIFT - 16), padding).view(-1, BLOCK)
    codes = ((y * (1.0 - offset) + offset).view(torch.int32) - offset_bits + rounding) >> SHIFT
    if signed:
        codes = torch.where(padded < 0, -codes, codes).to(torch.int8)
    else:
        codes = torch.where((codes == 0) & (y > 0), 1, codes).to(torch.uint8)
    return codes.view(-1)[: value.numel()], scale


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """Decodes what ``encode`` returned to fp32 [n]."""
    signed = codes.dtype == torch.int8
    offset, bits = _offset_bits(signed)
    wide = codes.to(torch.int32)
    y = ((wide.abs() << SHIFT) + bits).view(torch.float32)
    y = (y - offset) / (1.0 - offset)
    return torch.where(wide < 0, -y, y) * scale.repeat_interleave(BLOCK)[: codes.numel()]


def random_bits(first: int, numel: int, step: Tensor) -> Tensor:
    """Computes 32 random bits for each element of a part of a shard.

    Args:
        first: position of the first element in the shard.
        numel: number of elements.
        step: number of the step, 0-dim fp32.

    Returns:
        int64 [numel]. The low 16 bits round one state of the element, the high 16 another.
    """
    mask = 0xFFFFFFFF
    index = torch.arange(first, first + numel, device=step.device, dtype=torch.int64)
    x = (index * 0x9E3779B9 + step.to(torch.int64) * 0x85EBCA6B) & mask
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask
    x = ((x ^ (x >> 15)) * 0x846CA68B) & mask
    return x ^ (x >> 16)


def round_to_bf16(value: Tensor, bits: Tensor) -> Tensor:
    """Rounds fp32 to bf16 stochastically, so that the result is exact on average; ``bits``: 16 random bits each."""
    return ((value.view(torch.int32) + bits.to(torch.int32)) >> 16 << 16).view(torch.float32).to(torch.bfloat16)
