"""Build script. Metadata lives in pyproject.toml; this file is where compiled extensions are chosen.

The compiled operations are optional: without a C++ compiler, or without torch at build time (pip's isolated builds;
--no-build-isolation gives it), the package installs all the same and runs its plain PyTorch and Triton paths.
    python setup.py build_ext --inplace      builds them into a source tree
"""

import shutil
import sys
from pathlib import Path

from setuptools import setup

SOURCES = ["csrc/bindings.cpp", "csrc/cpu/gemm.cpp", "csrc/cpu/swiglu.cpp", "csrc/cpu/moe_mlp.cpp"]


def _without_kernels(reason):
    print(f"optimus: installing without compiled CPU kernels: {reason}", file=sys.stderr)
    return {}


def _extensions():
    if shutil.which("c++") is None and shutil.which("g++") is None and shutil.which("clang++") is None:
        return _without_kernels("no C++ compiler on the PATH; install g++ or clang++ and reinstall")
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
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

    extension = CppExtension(
        "megatron.optimus.ops._C",
        SOURCES,
        depends=[str(path) for path in sorted(Path("csrc").rglob("*.h"))],
        include_dirs=[str(Path(__file__).resolve().parent / "csrc" / "cpu")],
        extra_compile_args=["-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"],
        extra_link_args=["-fopenmp"],
        optional=True,
    )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": OptionalBuild}}


setup(**_extensions())
