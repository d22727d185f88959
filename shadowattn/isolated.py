"""Cases that may take a process down, in a process apart: started again behind the case that it died in.

A module of cases is run as `python -m MODULE DEVICE CASE …`, each case a JSON object with its name as `case`, and prints one JSON
object a case.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# A driver that takes longer to compile a graph of ours hangs.
TIMEOUT_S = 600


def run_apart(module: str, device: str, cases: Sequence[Mapping[str, Any]], *, progress: Callable = iter) -> list[dict[str, Any]]:
    """What the module prints of every case; of one that took the process down, its name and an `error` with the exit status."""
    done: list[dict[str, Any]] = []
    shown = iter(progress([case["case"] for case in cases]))
    while len(done) < len(cases):
        left = cases[len(done) :]
        lines, problem = _process(module, device, left)
        answers = [json.loads(line) for line in lines if line.startswith("{")]
        if len(answers) < len(left):
            answers.append({"case": left[len(answers)]["case"], "error": problem})
        done += answers
        for _ in answers:
            next(shown, None)
    next(shown, None)
    return done


def _process(module: str, device: str, cases: Sequence[Mapping[str, Any]]) -> tuple[list[str], str]:
    """The lines that a process printed before it was through or died, and what it died of."""
    command = [sys.executable, "-m", module, device, *map(json.dumps, cases)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as expired:
        printed = (expired.stdout or b"").decode(errors="replace")
        return printed.splitlines(), f"no answer within {TIMEOUT_S} s"
    message = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return done.stdout.splitlines(), f"the process ended with status {done.returncode}: {message}"
