"""What the README and the pages of docs/ say is run, in order, in an empty folder."""

import contextlib
import io
import re
import shlex
from glob import glob
from pathlib import Path

import pytest

from multilinear.cli import main
from multilinear.models import names

README = (Path(__file__).parents[1] / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
PAGES = [page for page in sorted((Path(__file__).parents[1] / "docs").glob("*.md")) if "```python" in page.read_text()]
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]


@pytest.mark.parametrize("code", PYTHON, ids=lambda code: code.splitlines()[0])
def test_examples_run(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_of_a_page_run_one_after_the_other(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    exec(compile(code, page.name, "exec"), {})


def run_commands(folder):
    """What each command prints, in one process: a new one would import torch anew for each."""
    found = {}
    (folder / "examples").symlink_to(Path(__file__).parents[1] / "examples")
    with contextlib.chdir(folder):
        for line in COMMANDS:
            program, *words = shlex.split(line.replace("multilinear demo", "multilinear demo --epochs 1"))
            assert program == "multilinear"
            expanded = [path for word in words for path in (sorted(glob(word)) if "*" in word else [word])]
            with contextlib.redirect_stdout(io.StringIO()) as out:
                main(expanded)  # one that fails raises SystemExit
            found[line] = out.getvalue()
        assert Path("micro.onnx").exists()
    return found


def test_commands_run_and_print_the_table_of_models(tmp_path):
    printed = run_commands(tmp_path)
    assert all(printed[line].strip() for line in COMMANDS)
    rows = [re.split(r"\s{2,}", line.strip()) for line in printed["multilinear models"].splitlines()]
    table = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in README.splitlines()]
    for name in names():
        assert [row for row in table if row[0] == name] == [row for row in rows if row[0] == name]
