"""What a plain `pip install` gives: the library alone, on its own dependencies."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import shadowattn

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

LIBRARY = """
import sys
for name in {extras!r}:
    sys.modules[name] = None  # as if it were not installed
import torch
import shadowattn
from shadowattn.calibration import Windows
from shadowattn.models import load_bundled

loaded = load_bundled()
text = "def add(a, b):\\n    return a + b\\n" * 400
small = {{"importance_windows": Windows(24, 1), "windows": Windows(64, 1), "chunk_tokens": 32}}
calibration = shadowattn.calibrate(loaded.model, loaded.tokenizer, text, allocator="waterfill", **small)
ids = torch.arange(60)[None]
for given in (0.2, calibration.profile):
    with torch.no_grad(), shadowattn.attach(loaded.model, given) as run:
        loaded.model(ids)
    print(run.counters.sparse_rows > 0)
q, k, v = torch.randn(4, 8, 64), torch.randn(2, 40, 64), torch.randn(2, 40, 64)
print(shadowattn.sparse_attention(q, k, v, 0.2, causal_offset=32).shape)
shadowattn.check_estimator(shadowattn.online.estimators.oracle.Oracle())
"""
# Of a distribution, the name that is imported.
IMPORTED = {"hydra-core": "hydra"}
# What transformers itself depends on.
OF_TRANSFORMERS = {"filelock", "pyyaml", "tqdm"}


def name_of(requirement: str) -> str:
    return re.match(r"[\w-]+", requirement)[0]


def test_the_library_runs_without_what_experiments_need():
    extras = {name_of(one) for one in PROJECT["project"]["optional-dependencies"]["experiments"]} - OF_TRANSFORMERS
    code = LIBRARY.format(extras=sorted(IMPORTED.get(name, name) for name in extras))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:3] == ["True", "True", "torch.Size([4, 8, 64])"]


def test_the_version_is_the_packages():
    assert shadowattn.__version__ == PROJECT["project"]["version"]
    assert f"version: {shadowattn.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize("words", ["Apache License", "Version 2.0, January 2004", "END OF TERMS AND CONDITIONS"])
def test_the_license_is_there(words):
    assert words in (ROOT / "LICENSE").read_text()


def test_a_wheel_holds_the_library_alone():
    assert PROJECT["tool"]["scikit-build"]["wheel"]["packages"] == ["shadowattn"]
