"""Build script. Metadata lives in pyproject.toml; this file is where compiled extensions are chosen.

The compiled operations are optional: without a C++ compiler, or without torch at build time (pip's isolated builds;
--no-build-isolation gives it), the package installs all the same and runs its plain PyTorch and Triton paths.
The SYCL kernels (csrc/sycl) are built where icpx is on the PATH and torch was built for Intel GPUs.
    python setup.py build_ext --inplace      builds them into a source tree
"""

import shutil
import sys
from pathlib import Path

from setuptools import setup

_CPU = ("gemm", "swiglu", "order", "moe_mlp", "grouped", "router")
SOURCES = ["csrc/bindings.cpp", *(f"csrc/cpu/{name}.cpp" for name in _CPU)]
SYCL_SOURCES = ["csrc/sycl/xpu.sycl"]


def _has_sycl():
    """Whether SYCL kernels are built; says what is missing on a machine that looks as if they were wanted."""
    import torch

    for_xpu, icpx = torch.xpu._is_compiled(), shutil.which("icpx") is not None
    if for_xpu and not icpx:
        print("optimus: installing without SYCL kernels: icpx is not on the PATH; source setvars.sh", file=sys.stderr)
    if icpx and not for_xpu:
        print("optimus: installing without SYCL kernels: this torch is not built for XPU", file=sys.stderr)
    return for_xpu and icpx


def _without_kernels(reason):
    print(f"optimus: installing without compiled kernels: {reason}", file=sys.stderr)
    return {}


def _extensions():
    if shutil.which("c++") is None and shutil.which("g++") is None and shutil.which("clang++") is None:
        return _without_kernels("no C++ compiler on the PATH; install g++ or clang++ and reinstall")
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension, SyclExtension
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

    sycl = _has_sycl()
    flags = ["-O3", "-g0", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
    extension = (SyclExtension if sycl else CppExtension)(
        "megatron.optimus.ops._C",
        [*SOURCES, *(SYCL_SOURCES if sycl else [])],
        depends=[str(path) for path in sorted(Path("csrc").rglob("*")) if path.suffix in (".h", ".hpp", ".sycl")],
        include_dirs=[str(Path(__file__).resolve().parent / "csrc" / folder) for folder in ("cpu", "sycl")],
        extra_compile_args={"cxx": flags, "sycl": ["-O3", "-ffp-model=precise"]} if sycl else flags,
        extra_link_args=["-fopenmp"],
        optional=True,
    )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": OptionalBuild}}


setup(**_extensions())
