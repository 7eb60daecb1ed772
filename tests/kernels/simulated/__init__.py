"""Runs Gluon kernels on the CPU, from their source, and looks for what a GPU does not report.

Groups of warps are threads that take turns at random, and copies come in when chance has it. Shared memory that nobody
wrote is NaN. It is an error to read what is still on its way, to write over what a product or a copy still reads, or
other warps of the group may, which did not meet since; to give products or copies what was stored without a fence, to
use a product before it is waited for, to leave the bounds of a tensor, and to wait for what never comes. That warps
which store and load tiles themselves wait for each other is up to the compiler. What it does not see either: how much
memory and how many registers there are, and how fast anything is.
"""

import types
from contextlib import contextmanager

import pytest
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from multilinear.kernels import hopper_names

from . import memory, program
from .language import Language, multiply, products_done, same
from .program import Program, Wrong

__all__ = ["Wrong", "simulating"]


def _replacements():
    barriers = types.SimpleNamespace(
        init=program.start_barrier, wait=program.wait_for, expect=program.expect, arrive=program.arrive,
        MBarrierLayout=hopper.mbarrier.MBarrierLayout,
    )  # fmt: skip
    stores = types.SimpleNamespace(store_wait=memory.wait_for_stores)
    loads = types.SimpleNamespace(commit_group=memory.commit_loads, wait_group=memory.wait_for_loads)
    pairs = [
        (gl, Language()), (hopper.mbarrier, barriers), (hopper.tma, stores), (hopper.async_copy, loads),
        (hopper.fence_async_shared, memory.fence), (hopper.warpgroup_mma, multiply),
        (hopper.warpgroup_mma_init, same), (hopper.warpgroup_mma_wait, products_done),
        (hopper_names.load_tile, memory.load_tile), (hopper_names.store_tile, memory.store_tile),
        (hopper_names.load_each, memory.load_each), (hopper_names.reinterpret, memory.reinterpret),
        (hopper_names.meet, memory.meet),
    ]  # fmt: skip
    return {id(theirs): ours for theirs, ours in pairs}


class Source:
    """The kernels' own code, in copies of their modules in which all of Gluon is what is simulated."""

    def __init__(self):
        self.replaced, self.modules, self.functions = _replacements(), {}, {}

    def function(self, kernel):
        function = kernel.fn
        if function not in self.functions:
            name, given = function.__globals__["__name__"], function.__globals__
            if name not in self.modules:
                self.modules[name] = {key: self._value(value) for key, value in given.items()}
            self.functions[function] = types.FunctionType(
                function.__code__, self.modules[name], function.__name__, function.__defaults__
            )
        return self.functions[function]

    def _value(self, value):
        if isinstance(value, GluonJITFunction):
            return lambda *given, **named: self.function(value)(*given, **named)
        if isinstance(value, gl.constexpr):
            return value.value
        return self.replaced.get(id(value), value)


def _argument(given):
    if isinstance(given, TensorDescriptor):
        return memory.Matrix(given)
    if isinstance(given, torch.Tensor):
        length = given.untyped_storage().nbytes() // given.itemsize
        return memory.Pointer(given.detach().as_strided((length,), (1,), 0), torch.tensor(given.storage_offset()))
    return given


@contextmanager
def simulating(seed=0):
    """Launches of Gluon kernels are run here, one program after the other; yields a list of those that were."""
    source, launched = Source(), []

    def launcher(kernel, grid):
        def launch(*given, num_warps=4, maxnreg=None, enable_fp_fusion=True, **constants):
            code = kernel.fn.__code__
            names = code.co_varnames[: code.co_argcount]
            arguments = dict(zip(names, map(_argument, given), strict=False)) | constants
            assert set(arguments) == set(names), set(arguments) ^ set(names)
            launched.append(kernel.fn.__name__)
            with torch.no_grad():
                for i in range(grid[0]):
                    Program(i, grid[0], num_warps, seed).run(source.function(kernel), arguments)

        return launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GluonJITFunction, "__getitem__", launcher)
        yield launched
