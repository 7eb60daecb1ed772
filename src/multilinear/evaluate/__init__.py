"""How good a network is, and what it says of an image."""

from multilinear.evaluate.predict import Prediction, Predictor

__all__ = ["Prediction", "Predictor"]
