"""What the README and the pages of docs/ say is run, in order, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from multilinear.cli import main
from multilinear.models import names

README = (Path(__file__).parents[1] / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
PAGES = [page for page in (Path(__file__).parents[1] / "docs").glob("*.md") if "```python" in page.read_text()]
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


def test_commands_run(tmp_path):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    (tmp_path / "examples").symlink_to(Path(__file__).parents[1] / "examples")
    for line in COMMANDS:
        line = line.replace("multilinear demo", "multilinear demo --epochs 1")  # the rest as it stands
        subprocess.run(
            ["bash", "-euc", line], cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=300
        )
    assert (tmp_path / "micro.onnx").exists()


def test_the_table_of_models_is_the_one_that_the_command_prints(capsys):
    main(["models"])
    printed = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    table = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in README.splitlines()]
    for name in names():
        assert [row for row in table if row[0] == name] == [row for row in printed if row[0] == name]
