"""Builds the native CPU ops; everything else about the package stands in pyproject.toml."""

from glob import glob

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "batchgen_kernels.cpu._ops",
            sources=["kernels/batchgen_kernels/cpu/ops.cpp"],
            depends=sorted(glob("kernels/batchgen_kernels/cpu/*.h")),
            language="c++",
            # No -march: the library holds a version for each instruction set and chooses when it is loaded.
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-g0",
                "-fopenmp",
                "-ffp-contract=fast",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-Wno-maybe-uninitialized",
            ],
            # Not linked with -fopenmp: the OpenMP runtime is the one torch has loaded, whatever its file is called,
            # because two runtimes in a process would fight for the cores (see batchgen_kernels/cpu/__init__.py).
            # It is a plain shared library without Python in it, so that one file serves every Python version.
            py_limited_api=True,
            # Without a compiler the package installs all the same and the plain-torch ops serve.
            optional=True,
        )
    ]
)
