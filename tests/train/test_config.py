from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

import multilinear as ml
from multilinear.data import DATASET_NAMES
from multilinear.train.config import OptimConfig, Recipe, find_recipe, load_recipe
from multilinear.train.optim import learning_rate

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_builds_its_model(path):
    recipe = load_recipe(path)
    assert recipe.data.name in (*DATASET_NAMES, "folder")
    with torch.device("meta"):
        ml.create(recipe.model.name, **recipe.model.arguments)
    assert find_recipe(path.stem) == path


def test_the_papers_imagenet_recipe():
    recipe = load_recipe("imagenet")
    assert (recipe.optim.lr, recipe.optim.warmup_lr, recipe.optim.min_lr) == (1e-3, 1e-4, 1e-5)
    assert (recipe.optim.warmup_epochs, recipe.run.epochs, recipe.run.batch_size) == (10, 300, 4 * 448)
    augment = recipe.augment
    assert (augment.policy, augment.erase, augment.mixup, augment.cutmix) == ("auto", 0.1, 0.5, 0.5)
    assert (recipe.optim.smoothing, recipe.optim.clip, recipe.optim.weight_decay) == (0.1, 1.0, 0.01)


def test_the_learning_rate_follows_the_papers_schedule():
    config = load_recipe("imagenet").optim
    rates = [config.lr * learning_rate(config, step, 300, 1) for step in range(301)]
    assert rates[0] == pytest.approx(1e-4)
    assert rates[10] == pytest.approx(1e-3)
    assert rates[300] == pytest.approx(1e-5)
    assert all(a < b for a, b in pairwise(rates[:11]))
    assert all(a > b for a, b in pairwise(rates[10:]))


@given(st.integers(1, 500), st.integers(1, 50), st.floats(0, 20))
def test_the_learning_rate_stays_between_its_ends(epochs, per_epoch, warmup):
    config = OptimConfig(lr=1.0, warmup_lr=0.2, min_lr=0.1, warmup_epochs=warmup)
    for step in range(0, epochs * per_epoch, max(1, epochs * per_epoch // 20)):
        assert 0.1 - 1e-9 <= learning_rate(config, step, epochs * per_epoch, per_epoch) <= 1 + 1e-9


def test_round_trip_through_yaml(tmp_path):
    recipe = load_recipe("cifar10", ["optim.lr=3e-3", "model.arguments.norm=batch"])
    path = tmp_path / "again.yaml"
    path.write_text(yaml.safe_dump(recipe.as_dict()))
    assert load_recipe(path) == recipe
    assert recipe.model.arguments["norm"] == "batch"


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        ({"optim": {"lrr": 1}}, [], r"unknown field 'optim.lrr' \(did you mean 'lr'\?\); known: name, lr,"),
        ({"optimiser": {}}, [], r"unknown field 'optimiser' \(did you mean 'optim'"),
        ({"optim": {"lr": "fast"}}, [], "optim.lr must be a number, got 'fast'"),
        ({"run": {"epochs": 2.5}}, [], "run.epochs must be a whole number, got 2.5"),
        ({"run": {"epochs": True}}, [], "run.epochs must be a whole number, got True"),
        ({"augment": {"flip": "yes"}}, [], "augment.flip must be true or false, got 'yes'"),
        ({"optim": {"lr": float("nan")}}, [], "optim.lr must be finite"),
        ({"run": []}, [], "run must be a mapping, got list"),
        ({"run": {"epochs": 0}}, [], "run.epochs must be positive, got 0"),
        ({"augment": {"policy": "wild"}}, [], "unknown augment.policy 'wild'; known: none, rand, trivial"),
        ({"augment": {"erase": 2.0}}, [], "augment.erase must be between 0 and 1"),
        ({"run": {"select": "ema"}}, [], "run.select is 'ema' but optim.ema is 0"),
        ({"run": {"batch_size": 10, "accumulate": 3}}, [], "10 is not divisible by run.accumulate 3"),
        ({}, ["lr=3"], "a change is written section.field=value"),
        ({}, ["optim.lr"], "a change is written section.field=value"),
        ({}, ["optim.speed=3"], "unknown field 'optim.speed'"),
        ({}, ["motor.speed=3"], "unknown section 'motor'; known: augment, data, model, optim, run"),
        ({}, ["optim.lr=[1"], "cannot read the value of 'optim.lr=[1'"),
    ],
)
def test_one_clear_line_for_what_is_wrong(values, changes, message):
    with pytest.raises(ml.MultilinearError) as caught:
        load_recipe(values, changes)
    assert "\n" not in str(caught.value)
    caught.match(message.replace("[1'", r"\[1'"))


def test_bad_files(tmp_path):
    with pytest.raises(ml.MultilinearError, match="no recipe at"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(ml.MultilinearError, match="unknown recipe 'cifar11'; known: cifar10, digits"):
        load_recipe("cifar11")
    (tmp_path / "bad.yaml").write_text("a: [1\nb")
    with pytest.raises(ml.MultilinearError, match="not readable YAML"):
        load_recipe(tmp_path / "bad.yaml")
    (tmp_path / "evil.yaml").write_text("!!python/object/apply:os.system ['true']")
    with pytest.raises(ml.MultilinearError, match="not readable YAML"):
        load_recipe(tmp_path / "evil.yaml")


def test_defaults_are_a_valid_recipe_and_a_recipe_takes_changes():
    recipe = load_recipe(Recipe(), ["run.epochs=7"])
    assert recipe.run.epochs == 7
    assert Recipe().run.epochs == 100
