"""What the compiler makes of the CUDA products, which no test of values sees: nothing keeps the tensor cores waiting.

Each of these cost the expert layer 1 to 5% when it was there (docs/design/expert_kernels.md, "One value a warp").
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.ops.test_triton_interpreted import BESIDE, ROOT

FLAGS = ["-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "--expt-relaxed-constexpr", "-Xptxas", "-v"]
KINDS = ("kUpSwiglu", "kRowsTransposed", "kRows", "kGradient", "kGradientWide", "kGradientAdd")


def tool(name: str) -> str | None:
    """nvcc or cuobjdump: of the toolkit, or the one that comes with Triton."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    with_triton = BESIDE / "triton" / "backends" / "nvidia" / "bin"
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), f"{home}/bin", str(with_triton)]))


@pytest.mark.skipif(tool("nvcc") is None or tool("cuobjdump") is None, reason="no nvcc, or no cuobjdump")
def test_the_tensor_cores_are_not_kept_waiting(tmp_path: Path) -> None:
    source, cubin = tmp_path / "gemm.cu", tmp_path / "gemm.cubin"
    kernels = ", ".join(f"(void*)grouped_gemm_kernel<__nv_bfloat16, GemmKind::{kind}>" for kind in KINDS)
    source.write_text(f'#include "mainloop.cuh"\nusing namespace optimus::cuda;\nvoid* kernels[] = {{{kernels}}};\n')
    include = ["-I", str(ROOT / "csrc" / "cuda")]
    command = [str(tool("nvcc")), *FLAGS, *include, "-cubin", "-o", str(cubin), str(source)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-3000:]
    serialized = re.findall(r"\(C75\d\d\).*", made.stderr)
    assert not serialized, serialized[0]
    assert all(int(n) <= 32 for n in re.findall(r"(\d+) bytes spill stores", made.stderr)), "registers spilled"
    listing = subprocess.run([str(tool("cuobjdump")), "-sass", str(cubin)], capture_output=True, text=True, check=True)
    found = [text for text in listing.stdout.split("Function : ")[1:] if "HGMMA" in text]
    assert len(found) == len(KINDS)
    for text in found:
        name = text.split("\n", 1)[0]
        instructions = re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(.*?);", text, flags=re.MULTILINE)
        multiplies = [place for place, what in enumerate(instructions) if "HGMMA" in what]
        between = instructions[multiplies[0] : multiplies[-1]]
        moved = sum("R2UR" in what for what in between)
        assert moved == 0, f"{name}: {moved} descriptors or bounds come from a thread's registers"
        loops = sum("BRA.U.ANY" in what for what in instructions)
        assert loops <= 3, f"{name}: {loops} copies of the tensor memory engine are looped over threads"
