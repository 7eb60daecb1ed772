"""Names of Gluon that differ between versions of Triton, each under one name of its own.

A name that was given up still exists and fails when it is called, so the later one decides. All of them take the same
arguments in the same order.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

# a tile from global to shared memory, where a barrier tells that it has come; and one back
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
# a tile from an address for each of its entries
load_each = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
# all warps of a group wait for each other
meet = getattr(gl, "barrier", None) or gl.thread_barrier
# shared memory as a tile of another kind; a method there
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
