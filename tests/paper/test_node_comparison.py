import json
import math
from dataclasses import replace

import pytest
import torch

from multilinear.cli import main
from multilinear.paper.node_comparison import (
    PUBLISHED,
    Run,
    Variant,
    annulus,
    claims,
    curves,
    summary,
    train,
    variants,
    write_page,
)

NODE, POLY, ANODE, POLY_ANODE = PUBLISHED


def test_points_and_targets():
    points, targets = annulus(3)
    radius = points.norm(dim=1)
    assert (targets[:500] == -1).all() and (targets[500:] == 1).all()
    assert radius[:500].max() <= 0.5 + 1e-6
    assert radius[500:].min() >= 1 - 1e-6 and radius[500:].max() <= 1.5 + 1e-6
    # uniform by area: half of the disc's points are beyond 0.5 / sqrt(2)
    assert (radius[:500] > 0.5 / math.sqrt(2)).float().mean().item() == pytest.approx(0.5, abs=0.1)
    assert not torch.equal(points, annulus(4)[0])


def test_the_models():
    found = {variant.name: variant for variant in variants()}
    assert [(v.parameters, v.epochs) for v in PUBLISHED] == [(1253, 40), (518, 40), (1583, 30), (888, 30)]
    for poly, rival in (("PolyNODE", NODE), ("PolyANODE", ANODE)):
        for change in ("wider", "order 4"):
            assert found[f"{poly}, {change}"].parameters == pytest.approx(rival.parameters, rel=0.03)


def test_counting_parameters_draws_no_random_numbers():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    assert NODE.parameters == 1253
    assert torch.equal(torch.rand(1), expected)


class TestTrain:
    @pytest.mark.parametrize("variant", PUBLISHED, ids=lambda variant: variant.name)
    def test_one_epoch_of_the_real_size(self, variant):
        run = train(replace(variant, epochs=1), seed=0)
        assert run.failure is None
        assert 0.1 < run.losses[0] < 0.8 and 0.3 < run.accuracy <= 1
        assert 14 <= run.evaluations[0] < 40 and run.seconds > 0
        assert run.frames.shape == (3, 400, 2)

    def test_it_learns_and_is_the_same_again(self):
        runs = [train(replace(ANODE, epochs=8), seed=1, count=512) for _ in range(2)]
        assert runs[0].losses == runs[1].losses
        assert runs[0].losses[-1] < 0.8 * runs[0].losses[0]

    def test_a_blow_up_is_recorded_and_meets_no_claim(self, monkeypatch):
        def build(self):
            model = Variant.build_before(self)
            if self.polynomial:
                for parameter in model.field.parameters():
                    parameter.data.mul_(30)
            return model

        monkeypatch.setattr(Variant, "build_before", Variant.build, raising=False)
        monkeypatch.setattr(Variant, "build", build)
        runs = [train(replace(variant, epochs=1), 0, count=128) for variant in (NODE, POLY)]
        assert runs[0].failure is None
        assert runs[1].failure.startswith("after 0 epochs: ")
        assert runs[1].loss == math.inf and runs[1].accuracy == 0
        assert summary(runs)[1]["finished"] == 0
        assert summary(runs)[1]["failures"] == [f"seed 0, {runs[1].failure}"]
        assert [won for _, _, won, _ in claims(runs)] == [0] * 5


def made_up(variant, seed, losses, seconds=1.0, accuracy=1.0, failure=None):
    return Run(variant, seed, losses, [14.0] * len(losses), seconds, accuracy, failure)


class TestClaims:
    def test_they_are_counted_seed_by_seed(self):
        runs = [
            made_up(NODE, 0, [0.3, 0.09, 0.02], seconds=2.0),
            made_up(NODE, 1, [0.3, 0.09, 0.005]),
            made_up(POLY, 0, [0.05, 0.02, 0.01], seconds=1.0),
            made_up(POLY, 1, [0.3, 0.2, 0.15], seconds=9.0, accuracy=0.98),
        ]
        found = {claim: (won, of) for name, claim, won, of in claims(runs) if name == "PolyNODE"}
        assert list(found.values()) == [(1, 2), (1, 2), (0, 2), (1, 2), (1, 2)]
        assert next(iter(found)).endswith("than NODE")

    def test_only_the_same_seed_and_the_same_family_are_compared(self):
        runs = [made_up(NODE, 0, [0.1]), made_up(ANODE, 5, [0.1]), made_up(POLY, 7, [0.01])]
        assert claims(runs) == [("PolyNODE", '"easily approximate": 99% of fresh points right', 1, 1)]

    def test_a_run_that_blew_up_late_reached_nothing(self):
        run = made_up(POLY, 0, [0.05, 0.01], failure="after 2 epochs: ...")
        assert run.epochs_to(0.1) == math.inf
        assert made_up(POLY, 0, [0.05, 0.01]).epochs_to(0.1) == 1


def test_means_are_of_the_runs_that_finished():
    runs = [made_up(POLY, 0, [0.1]), made_up(POLY, 1, [0.3]), made_up(POLY, 2, [], failure="after 0 epochs: ...")]
    (row,) = summary(runs)
    assert (row["runs"], row["finished"]) == (3, 2)
    assert row["loss"] == pytest.approx([0.2, 0.1414], abs=1e-3)


def test_the_page_shows_every_model_and_every_failure(tmp_path):
    runs = [train(replace(variant, epochs=1), 0, count=128) for variant in PUBLISHED]
    dead = replace(POLY, name="PolyNODE, order 4", order=4)
    runs.append(made_up(dead, 0, [], failure="after 0 epochs: a state of length 2e+03 passed the limit"))
    page = write_page(runs, tmp_path / "page.html").read_text()
    assert "5 runs, 1 of them blew up" in page
    assert "0 of 1" in page and "none finished" in page and "passed the limit" in page
    assert "of 1 seeds" in page and "1253" in page
    assert page.count("data:image/png") == 2


def test_curves_of_runs_of_different_length():
    figure = curves([made_up(POLY, 0, [0.3, 0.2]), made_up(POLY, 1, [0.4], failure="after 1 epochs: ...")])
    (line,) = figure.axes[0].lines
    assert line.get_ydata().tolist() == pytest.approx([0.35, 0.2])
    assert "1 of 2 finished" in line.get_label()


@pytest.mark.slow
def test_the_augmented_model_solves_it():
    run = train(ANODE, 0)
    assert run.loss < 0.003 and run.accuracy > 0.995


def test_the_command_prints_a_row_for_each_model(capsys):
    main(["node-comparison", "--seeds", "0", "--epochs", "1", "--published-only", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [row["model"] for row in found["models"]] == ["NODE", "PolyNODE", "ANODE", "PolyANODE"]
    with pytest.raises(SystemExit):
        main(["node-comparison", "--epochs", "0"])
