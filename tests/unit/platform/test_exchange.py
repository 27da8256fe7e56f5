"""Two real ranks exchange tensors; where they cannot, one line says why, and none is left behind."""

from __future__ import annotations

import time

from megatron.optimus.platform.exchange import exchange

# That two ranks exchange: tests/unit/commands/test_doctor.py, which starts them once for both.


def test_what_the_ranks_say_is_the_error_and_a_limit_ends_them() -> None:
    assert "device=xpu, but torch" in (exchange("xpu").error or "")
    began = time.monotonic()
    assert exchange("cpu", limit_s=0.2).error == "the ranks did not end within 0.2 s"
    assert time.monotonic() - began < 10
