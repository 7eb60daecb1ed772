"""From names and files to arrays and batches."""

from multilinear.data.arrays import ArrayData, Split, channel_statistics, hold_out, load_npz, save_npz
from multilinear.data.catalog import DATASET_NAMES, class_names
from multilinear.data.folder import FolderInfo, TolerantFolder, folder_loader, open_folder
from multilinear.data.images import open_image
from multilinear.data.sources import load_dataset

__all__ = [
    "DATASET_NAMES",
    "ArrayData",
    "FolderInfo",
    "Split",
    "TolerantFolder",
    "channel_statistics",
    "class_names",
    "folder_loader",
    "hold_out",
    "load_dataset",
    "load_npz",
    "open_folder",
    "open_image",
    "save_npz",
]
