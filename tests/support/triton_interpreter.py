# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Runs Triton kernels on the CPU, by Triton's own interpreter, on numpy arrays.

The interpreter has to be chosen before triton is imported, so it lives in a process of its own. It
executes the very functions that the compiler gets, one program after another. It knows neither
threads nor shared memory: races and sizes are not its business. Two of its habits are corrected
here: it multiplies exactly whatever precision was asked for, and it truncates to bfloat16.
"""

import concurrent.futures
import importlib
import multiprocessing
import os

import ml_dtypes
import numpy as np


def start():
    """A pool of one process, to `submit(interpret, ...)` to."""
    return concurrent.futures.ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), initializer=_initialise
    )


def _initialise():
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    cast, dot = builder.cast_impl, builder.create_dot

    def exact_cast(self, source, to):
        names = source.dtype.scalar.name, to.scalar.name
        if names == ("fp32", "bf16"):
            bits = source.data.astype(ml_dtypes.bfloat16).view(np.uint16)
            return interpreter.TensorHandle(bits, to.scalar)
        return cast(self, source, to)

    def rounded_dot(self, a, b, d, precision, imprecise):
        big = [_tf32(x.data) for x in (a, b)]
        if precision.name == "TF32":
            out = big[0] @ big[1]
        elif precision.name == "TF32x3":
            small = [_tf32(x.data - y) for x, y in zip((a, b), big)]
            out = big[0] @ small[1] + small[0] @ big[1] + big[0] @ big[1]
        else:
            return dot(self, a, b, d, precision, imprecise)
        return interpreter.TensorHandle(out + d.data, d.dtype.scalar)

    builder.cast_impl = builder.create_fp_trunc = exact_cast
    builder.create_dot = rounded_dot


def _tf32(x):
    """To 10 bits of mantissa, to the nearest."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32)


class _Buffer:
    """As much of a torch tensor as the interpreter asks for."""

    def __init__(self, array):
        self.array, self.dtype = array, None if array is None else array.dtype.name

    def data_ptr(self):
        return self.array.ctypes.data

    def cpu(self):
        return self

    untyped_storage = cpu

    def new_empty(self, *_, **__):
        return _Buffer(None)

    def set_(self, storage, *_):
        self.__init__(storage.array)

    def storage_offset(self):
        return None

    size = stride = storage_offset

    def copy_(self, other):
        assert other.array is self.array


def interpret(kernel, arrays, scalars, results, programs, aliases, constants):
    """What `triton_gpu.launch` returns, as numpy arrays. results: shapes and dtypes.

    Results start as NaN, or as the input that they alias.
    """
    module, name = kernel.split(":")
    kernel = getattr(importlib.import_module(module), name)
    arrays = [np.array(x) for x in arrays]  # aligned, writable, contiguous
    before = [x.copy() for x in arrays]
    out = [np.full(shape, np.nan, dtype) for shape, dtype in results]
    for i, j in aliases.items():
        out[j] = arrays[i]
    buffers = [*map(_Buffer, arrays), *scalars, *map(_Buffer, out)]
    kernel[(programs,)](*buffers, **constants)
    for i, (x, y) in enumerate(zip(arrays, before)):
        if i not in aliases:
            np.testing.assert_array_equal(x, y, f"the kernel changed its input {i}")
    return out
