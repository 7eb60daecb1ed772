"""Classify images that the server never sees: compile a polynomial network, plan, run it under CKKS."""

from multilinear.encrypted.client import Client
from multilinear.encrypted.compiler import compile
from multilinear.encrypted.parameters import SECURE_BITS, Parameters
from multilinear.encrypted.plan import Plan
from multilinear.encrypted.program import Program, Public
from multilinear.encrypted.server import Server

__all__ = ["SECURE_BITS", "Client", "Parameters", "Plan", "Program", "Public", "Server", "compile"]
