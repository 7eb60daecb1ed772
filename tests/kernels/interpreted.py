"""Checks that need Triton's interpreter: functions of a test file, which is run as a script in a process of its own."""

import os
import subprocess
import sys

import torch


def run_interpreted(file, name):
    """Have a check of that file made."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    found = subprocess.run([sys.executable, file, name], env=environment, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-3000:]


def main(checks):
    """In that process."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # which also fills new memory with NaN, for those who read it too early
    patch_once()
    checks[sys.argv[1]]()


def patch_once():
    """The interpreter puts its own language in place at each call of a function within a kernel, which takes a third of
    its time; once for each launch is enough."""
    from triton.runtime import interpreter

    launch, call = interpreter.GridExecutor.__call__, interpreter.InterpretedFunction.__call__
    patch, patched, within = interpreter._patch_lang, set(), []

    def launch_afresh(self, *given, **named):
        patched.clear()
        return launch(self, *given, **named)

    def call_within(self, *given, **named):
        within.append(True)
        try:
            return call(self, *given, **named)
        finally:
            within.pop()

    def patch_if_new(function):
        languages = interpreter.tl, interpreter.tl.core
        seen = frozenset(i for i, one in enumerate(languages) if any(v is one for v in function.__globals__.values()))
        if within and seen in patched:
            return None
        patched.add(seen)
        return patch(function)

    interpreter.GridExecutor.__call__ = launch_afresh
    interpreter.InterpretedFunction.__call__ = call_within
    interpreter._patch_lang = patch_if_new
