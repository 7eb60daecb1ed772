import json

import pytest

from multilinear.cli import main
from multilinear.paper.lotka_volterra import recover


@pytest.mark.parametrize(("points", "limit"), [(100, 1e-8), (25, 1e-6)])
def test_two_starts_recover_the_equation(points, limit):
    for seed in (0, 1):
        found = recover(seed, points)
        assert found.error < limit
        assert str(found.equations["x"]) == "-1.12*x*y + 1.56*x"
        assert str(found.equations["y"]) == "1.21*x*y - 3.1*y"


def test_the_command(capsys, tmp_path):
    main(["lotka-volterra", "--seeds", "3", "--report", str(tmp_path / "page.html"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["errors"][0] < 1e-8
    page = (tmp_path / "page.html").read_text()
    assert "1.12001" in page
    assert page.count("data:image/png") == 2


@pytest.mark.slow
def test_twenty_starts():
    assert sum(recover(seed).error < 1e-8 for seed in range(20)) == 20
    assert sum(recover(seed, 25).error < 1e-6 for seed in range(20)) >= 19
