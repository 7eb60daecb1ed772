"""Networks made of additions and multiplications only, so that you can train them, read them and encrypt them.

Importing this registers every model with timm.
"""

from multilinear.analysis import audit, cost, expand
from multilinear.errors import MultilinearError
from multilinear.layers import MuLayer, PatchEmbed, PolyBlock, PyramidPatchEmbed, fold, spatial_shift
from multilinear.models import MONet, create, from_release, load, save
from multilinear.optimize import optimize

__version__ = "0.1.0"

__all__ = [
    "MONet",
    "MuLayer",
    "MultilinearError",
    "PatchEmbed",
    "PolyBlock",
    "PyramidPatchEmbed",
    "audit",
    "cost",
    "create",
    "expand",
    "fold",
    "from_release",
    "load",
    "optimize",
    "save",
    "spatial_shift",
]
