import matplotlib
import pytest
import torch

matplotlib.use("Agg")


def pytest_collection_modifyitems(items):
    """Tests marked `gpu` are skipped where there is none, so that any selection of tests runs anywhere."""
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
