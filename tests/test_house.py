"""The design, kept true: arrows between rooms, file sizes, and no pickles."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "multilinear"
ROOMS = (
    "layers",
    "models",
    "kernels",
    "data",
    "train",
    "evaluate",
    "analysis",
    "segment",
    "ode",
    "encrypted",
    "paper",
    "app",
)
# what a room may import; rooms that are not listed may import everything
ALLOWED = {
    "layers": {"kernels"},
    "kernels": set(),
    "data": set(),
    "models": {"layers", "data"},
    "analysis": {"models", "layers", "data"},
    "evaluate": {"models", "layers", "data", "analysis"},
    "train": {"models", "layers", "data", "analysis", "evaluate"},
    "segment": {"models", "layers", "data"},
    "ode": {"layers"},
    "encrypted": {"models", "layers", "data", "analysis"},
}
FILES = sorted(PACKAGE.rglob("*.py"))


def imported_rooms(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "multilinear" and len(parts) > 1 and parts[1] in (*ROOMS, "cli"):
                yield parts[1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows_point_one_way(path):
    room = path.relative_to(PACKAGE).parts[0]
    if room in ALLOWED:
        assert set(imported_rooms(path)) <= ALLOWED[room] | {room}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_can_be_read_in_a_sitting(path):
    assert len(path.read_text().splitlines()) <= 350


def test_nothing_unpickles_or_evaluates():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                assert name not in ("eval", "exec", "torch.load", "pickle.load", "pickle.loads"), (path, name)
