"""How good a network is, and what it says of an image."""

from multilinear.analysis.graph import evaluation_mode
from multilinear.evaluate import plots
from multilinear.evaluate.evaluate import Evaluation, evaluate
from multilinear.evaluate.metrics import Metrics
from multilinear.evaluate.plots import write_report
from multilinear.evaluate.predict import Prediction, Predictor
from multilinear.evaluate.speed import Speed, measure_speed

__all__ = [
    "Evaluation",
    "Metrics",
    "Prediction",
    "Predictor",
    "Speed",
    "evaluate",
    "evaluation_mode",
    "measure_speed",
    "plots",
    "write_report",
]
