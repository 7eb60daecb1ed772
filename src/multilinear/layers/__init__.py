"""The vocabulary: everything here is additions and multiplications, except where a norm says otherwise."""

from multilinear.kernels import compile_together
from multilinear.layers.embed import FUSIONS, PatchEmbed, PyramidPatchEmbed, check_image_size
from multilinear.layers.fold import fold, is_folded
from multilinear.layers.init import DEFAULT_INIT, INITIALISERS, init_weights
from multilinear.layers.mu import FoldedMuLayer, MuLayer, PolyBlock, compile_blocks, prepare_ahead
from multilinear.layers.norm import NORMS, Affine, BatchNorm, affine_of, collect_statistics, make_norm
from multilinear.layers.shift import BORDERS, SpatialShift, spatial_shift

__all__ = [
    "BORDERS",
    "DEFAULT_INIT",
    "FUSIONS",
    "INITIALISERS",
    "NORMS",
    "Affine",
    "BatchNorm",
    "FoldedMuLayer",
    "MuLayer",
    "PatchEmbed",
    "PolyBlock",
    "PyramidPatchEmbed",
    "SpatialShift",
    "affine_of",
    "check_image_size",
    "collect_statistics",
    "compile_blocks",
    "compile_together",
    "fold",
    "init_weights",
    "is_folded",
    "make_norm",
    "prepare_ahead",
    "spatial_shift",
]
