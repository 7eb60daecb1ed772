"""The models; importing this registers each of them with timm."""

from multilinear.models.monet import MONet
from multilinear.models.release import ReleasedWeightsWarning, from_release
from multilinear.models.weights import create, load, names, read_header, save

__all__ = ["MONet", "ReleasedWeightsWarning", "create", "from_release", "load", "names", "read_header", "save"]
