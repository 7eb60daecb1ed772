"""From names and files to arrays."""

from multilinear.data.images import open_image

__all__ = ["open_image"]
