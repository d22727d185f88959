"""Shared fixtures. Nothing here downloads anything."""

import contextlib
import gc
import os
import sys
from pathlib import Path

# Before torch and transformers are imported anywhere.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

# OpenVINO imports absl where OR-tools has brought it along. absl's log handler keeps the stderr of that moment, and Hydra, which
# closes all handlers, would close pytest's capture with it; the real stderr it leaves open.
with contextlib.redirect_stderr(sys.__stderr__):
    import openvino  # noqa: F401

import pytest
import transformers
from hypothesis import HealthCheck, settings

from shadowattn.artifacts import cache_folder
from shadowattn.models import load_known

FETCHED = cache_folder()  # of the user, before tests have one of their own

transformers.utils.logging.disable_progress_bar()
# Shared machines stall; a deadline would make a correct test fail.
settings.register_profile("default", deadline=None, max_examples=40)
# For sanitizers and an emulated processor, many times slower: pytest --hypothesis-profile=few
settings.register_profile("few", deadline=None, max_examples=10, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")


def pytest_collection_finish():
    """What importing has made stays as long as the process: no garbage collection has to walk through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def hub_cache(tmp_path, monkeypatch):
    """Whatever Hugging Face caches goes with the test."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.fixture(autouse=True)
def own_modules(tmp_path):
    """What a test imports from its folder goes with the test: a module of that name is another one in the next."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(f"{tmp_path}{os.sep}"):
            del sys.modules[name]


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """What is measured of this machine, once for all tests of a process, and nothing of the user's."""
    os.environ.setdefault("SHADOWATTN_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def smollm2(monkeypatch):
    """The real model, where it was fetched."""
    if not (FETCHED / "smollm2").is_dir():
        pytest.skip("SmolLM2 is not in the user's cache; python -m experiments.fetch smollm2 downloads it")
    monkeypatch.setenv("SHADOWATTN_CACHE", str(FETCHED))
    return load_known("smollm2", source="fetched")


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Real texts and models that are not part of the repository."""
    folder = os.environ.get("SHADOWATTN_TEST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("SHADOWATTN_TEST_DATA names no folder with the real texts and models that this test reads")
    return Path(folder)
