"""Build script. Metadata lives in pyproject.toml; this file is where compiled extensions are chosen.

The compiled operations are optional: without a C++ compiler, or without torch at build time (pip's isolated builds;
--no-build-isolation gives it), the package installs all the same and runs its plain PyTorch and Triton paths.
The SYCL kernels (csrc/sycl) are built where icpx is on the PATH and torch was built for Intel GPUs, those for Hopper
GPUs (csrc/cuda) where nvcc is there and torch was built for CUDA, unless TORCH_CUDA_ARCH_LIST names no 9.0.
    python setup.py build_ext --inplace      builds them into a source tree
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import __version__ as setuptools_version
from setuptools import setup

_CPU = ("gemm", "gemm_vector", "gemm_amx", "swiglu", "row_order", "schedule", "moe_mlp", "row_copies", "router")
SOURCES = ["csrc/bindings.cpp", *(f"csrc/cpu/{name}.cpp" for name in _CPU)]
SYCL_SOURCES = ["csrc/sycl/xpu.sycl"]
CUDA_SOURCES = [f"csrc/cuda/{name}" for name in ("moe_mlp.cpp", "layer.cpp", "row_order.cu", "grouped_gemm.cu")]
_OLDEST_CUDA = (12, 5)  # has cudaGetDriverEntryPointByVersion


def _check_setuptools():
    """Ends the build in one line where setuptools is older than pyproject.toml asks for.

    pip looks at that only in builds that it isolates; the build would end in a page about pyproject.toml's license.
    """
    text = Path(__file__).with_name("pyproject.toml").read_text(encoding="utf-8")
    least = re.search(r'"setuptools>=(\d+)"', text).group(1)
    if int(setuptools_version.partition(".")[0]) < int(least):
        remedy = f"pip install -U 'setuptools>={least}'"
        sys.exit(f"error: setuptools {setuptools_version} is too old to build this package: {remedy}")


def _has_sycl():
    """Whether SYCL kernels are built; says what is missing on a machine that looks as if they were wanted."""
    import torch

    for_xpu, icpx = torch.xpu._is_compiled(), shutil.which("icpx") is not None
    if for_xpu and not icpx:
        print("optimus: installing without SYCL kernels: icpx is not on the PATH; source setvars.sh", file=sys.stderr)
    if icpx and not for_xpu:
        print("optimus: installing without SYCL kernels: this torch is not built for XPU", file=sys.stderr)
    return for_xpu and icpx


def _has_cuda():
    """Whether kernels for Hopper GPUs are built; says what is missing where torch was built for CUDA."""
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    if torch.version.cuda is None:
        return False
    reason = None
    nvcc = Path(CUDA_HOME or "", "bin", "nvcc")
    wanted = os.environ.get("TORCH_CUDA_ARCH_LIST", "9.0")
    if CUDA_HOME is None or not nvcc.exists():
        reason = f"no nvcc; install the CUDA {torch.version.cuda} toolkit or point CUDA_HOME at it"
    elif "9.0" not in wanted and "Hopper" not in wanted:
        reason = f"TORCH_CUDA_ARCH_LIST={wanted} has no 9.0"
    else:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
        version = tuple(int(part) for part in re.search(r"release (\d+)\.(\d+)", text).groups())
        if version < _OLDEST_CUDA or version[0] != int(torch.version.cuda.split(".")[0]):
            reason = f"nvcc is {version[0]}.{version[1]}, torch is built with CUDA {torch.version.cuda}; 12.5 or newer"
    if reason is not None:
        print(f"optimus: installing without kernels for Hopper GPUs: {reason}", file=sys.stderr)
    return reason is None


def _without_kernels(reason):
    print(f"optimus: installing without compiled kernels: {reason}", file=sys.stderr)
    return {}


def _extensions():
    if shutil.which("c++") is None and shutil.which("g++") is None and shutil.which("clang++") is None:
        return _without_kernels("no C++ compiler on the PATH; install g++ or clang++ and reinstall")
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension, SyclExtension
    except ImportError:
        return _without_kernels("torch is not importable at build time; use pip install --no-build-isolation")

    class OptionalBuild(BuildExtension):
        """Lets a compiler's failure end in an installation without the extension."""

        def build_extensions(self):
            try:
                super().build_extensions()
            except Exception as error:
                if self.inplace:
                    raise
                self.extensions = []
                _without_kernels(f"the compiler failed ({str(error).splitlines()[0]})")

    flags = ["-O3", "-g0", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
    kind, more_sources, more_flags = CppExtension, [], {}
    if _has_sycl():
        kind, more_sources = SyclExtension, SYCL_SOURCES
        more_flags = {"sycl": ["-O3", "-ffp-model=precise"]}
    elif _has_cuda():
        kind, more_sources = CUDAExtension, CUDA_SOURCES
        more_flags = {"nvcc": ["-O3", "-gencode=arch=compute_90a,code=sm_90a"]}  # 90a: the matrix instructions
    headers = (".h", ".hpp", ".cuh", ".sycl")
    extension = kind(
        "megatron.optimus.ops._C",
        [*SOURCES, *more_sources],
        depends=[str(path) for path in sorted(Path("csrc").rglob("*")) if path.suffix in headers],
        include_dirs=[str(Path(__file__).resolve().parent / "csrc" / folder) for folder in ("cpu", "sycl")],
        extra_compile_args={"cxx": flags, **more_flags} if more_flags else flags,
        extra_link_args=["-fopenmp"],
        optional=True,
    )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": OptionalBuild}}


_check_setuptools()
setup(**_extensions())
