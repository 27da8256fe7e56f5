"""Intel's extension and oneCCL's bindings, by stand-ins: found, refused or absent. test_ccl.py trains with one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from megatron.optimus.platform import older_stacks
from megatron.optimus.platform.older_stacks import CCL, IPEX, ccl_error, load_ipex, version


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """``stand_in(module, version, text)`` installs a module with its metadata for the length of a test."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(module: str, found: str, text: str = "") -> None:
        (tmp_path / f"{module}.py").write_text(text)
        info = tmp_path / f"{older_stacks._DISTRIBUTIONS[module][0].replace('-', '_')}-{found}.dist-info"
        info.mkdir()
        name = older_stacks._DISTRIBUTIONS[module][0]
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {found}\n")
        monkeypatch.delitem(sys.modules, module, raising=False)
        load_ipex.cache_clear()

    yield install
    for module in older_stacks._DISTRIBUTIONS:
        sys.modules.pop(module, None)
    load_ipex.cache_clear()


@pytest.mark.skipif(version(IPEX) is not None, reason="the real one is installed")
def test_intels_extension_is_used_where_it_fits_this_torch(stand_in) -> None:  # type: ignore[no-untyped-def]
    load_ipex.cache_clear()
    assert version(IPEX) is None and load_ipex() is None
    own = torch.__version__.partition("+")[0]
    stand_in(IPEX, own)
    assert load_ipex() == f"intel-extension-for-pytorch {own} (its kernels of cpu and xpu)"


@pytest.mark.skipif(version(IPEX) is not None, reason="the real one is installed")
def test_one_for_another_torch_is_left_alone(stand_in) -> None:  # type: ignore[no-untyped-def]
    """It would end the process, as this stand-in does."""
    stand_in(IPEX, "1.13.0", "raise SystemExit(127)")
    line = f"intel-extension-for-pytorch 1.13.0 not used: it is for torch 1.13, and this is torch {torch.__version__}"
    assert load_ipex() == line


@pytest.mark.skipif(version(IPEX) is not None, reason="the real one is installed")
def test_one_that_ends_the_process_does_not_end_the_run(stand_in) -> None:  # type: ignore[no-untyped-def]
    stand_in(IPEX, torch.__version__.partition("+")[0], "raise SystemExit('no libmkl')")
    assert (load_ipex() or "").endswith(" not used: it cannot be imported (no libmkl)")


@pytest.mark.skipif(version(CCL) is not None, reason="the real one is installed")
def test_bindings_that_are_absent_or_register_nothing(stand_in) -> None:  # type: ignore[no-untyped-def]
    assert (ccl_error() or "").startswith("oneccl_bindings_for_pytorch is not installed: pip install oneccl_bind_pt")
    stand_in(CCL, "2.8.0")
    assert ccl_error() == "oneccl_bindings_for_pytorch 2.8.0 does not register a backend ccl"
