"""The setup of the NPU compiler, without its downloads: what it refuses, and that it goes on where it stopped."""

import json
import shutil
import subprocess
from importlib.metadata import version

import pytest

from experiments import npu_compiler
from shadowattn.errors import InputError
from shadowattn.graphs.npu.compiler import MANIFEST


@pytest.fixture
def steps(monkeypatch):
    """Steps that are counted, in place of the downloads; `fail` names one that fails."""
    done, fail = [], set()

    def step(name):
        def run(into, folder):
            """counting"""
            if name in fail:
                raise InputError(f"no {name}")
            (into / "file").write_text(name)
            done.append(name)

        return run

    monkeypatch.setattr(npu_compiler, "_STEPS", {name: step(name) for name in ("wheels", "debs")})
    monkeypatch.setattr(npu_compiler, "_check_system", lambda: None)
    return done, fail


def test_an_interrupted_setup_goes_on_with_the_step_that_is_missing(steps, tmp_path):
    done, fail = steps
    fail.add("debs")
    with pytest.raises(InputError, match="no debs"):
        npu_compiler.install(tmp_path / "it")
    assert not (tmp_path / "it" / MANIFEST).exists()
    fail.clear()
    npu_compiler.install(tmp_path / "it")
    npu_compiler.install(tmp_path / "it")
    assert done == ["wheels", "debs"]
    assert sorted(path.name for path in (tmp_path / "it").iterdir()) == ["debs", MANIFEST, "wheels"]


def test_another_system_is_refused_in_a_line(monkeypatch, tmp_path):
    monkeypatch.setattr(npu_compiler.platform, "machine", lambda: "arm64")
    with pytest.raises(InputError, match="expected Linux on x86-64, where wine runs it"):
        npu_compiler.install(tmp_path / "it")


def test_without_debians_tools_it_says_which(monkeypatch, tmp_path):
    monkeypatch.setattr(npu_compiler.sys, "platform", "linux")
    monkeypatch.setattr(npu_compiler.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(npu_compiler.shutil, "which", lambda tool: None)
    with pytest.raises(InputError, match="expected apt-get and dpkg for Debian's wine"):
        npu_compiler.install(tmp_path / "it")


def test_a_failed_download_names_its_reason_and_the_remedy(monkeypatch, tmp_path):
    failed = subprocess.CompletedProcess([], 100, stderr="N: hint\nE: Unable to locate package wine64\n")
    monkeypatch.setattr(npu_compiler.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(InputError, match=r"E: Unable to locate package wine64.*apt-get update, then the same command"):
        npu_compiler._debs(tmp_path, tmp_path)


@pytest.mark.parametrize("found", ['{"openvino": "2025.1.0"}', "[]", "{", "{}"])
def test_a_setup_of_another_openvino_or_a_broken_one_is_made_anew(steps, tmp_path, found):
    done, _ = steps
    npu_compiler.install(tmp_path / "it")
    (tmp_path / "it" / MANIFEST).write_text(found)
    npu_compiler.install(tmp_path / "it")
    assert done == ["wheels", "debs", "wheels"]
    assert json.loads((tmp_path / "it" / MANIFEST).read_text())["openvino"] == version("openvino")


def test_a_missing_part_is_brought_back(steps, tmp_path):
    done, _ = steps
    npu_compiler.install(tmp_path / "it")
    shutil.rmtree(tmp_path / "it" / "debs")
    npu_compiler.install(tmp_path / "it")
    assert done == ["wheels", "debs", "debs"]


def test_a_folder_that_cannot_be_made_is_refused(steps, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="set SHADOWATTN_CACHE to a folder that can"):
        npu_compiler.install(tmp_path / "file" / "it")


def test_another_version_of_the_program_is_built_anew(steps, tmp_path, monkeypatch):
    done, _ = steps
    npu_compiler.install(tmp_path / "it")
    (tmp_path / "it" / "app").mkdir()
    (tmp_path / "host.c").write_text("another")
    monkeypatch.setattr(npu_compiler, "_HOST", tmp_path / "host.c")
    npu_compiler.install(tmp_path / "it")
    assert not (tmp_path / "it" / "app").exists()
    assert done == ["wheels", "debs"]
