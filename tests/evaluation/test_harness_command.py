"""The harness's own command knows the model once the line is in place, and other commands do not see it."""

import os
import subprocess
import sys

import pytest

from shadowattn.errors import InputError
from shadowattn.evaluation.harness_command import FILE, add, main


@pytest.fixture
def environment(tmp_path):
    """Python that reads `.pth` files of `tmp_path` at its start, as it does those of site-packages."""
    add(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(f"import site; site.addsitedir({str(tmp_path)!r})\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


def run(environment, *command):
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_lm_eval_then_finds_the_model(environment, tmp_path):
    script = tmp_path / "lm_eval"
    script.write_text("from lm_eval.api.registry import get_model\nprint(get_model('shadowattn'))\n")
    found = run(environment, sys.executable, str(script))
    assert "shadowattn.evaluation.harness.ShadowAttnLM" in found.stdout, found.stderr


def test_its_whole_command_asks_the_model_for_a_retention(environment):
    command = "run", "--model", "shadowattn", "--tasks", "arc_easy", "--model_args", "pretrained=nowhere"
    assert "expected a retention" in run(environment, sys.executable, "-m", "lm_eval", *command).stderr


def test_other_commands_are_left_alone(environment, tmp_path):
    script = tmp_path / "other"
    script.write_text("import sys\nprint('lm_eval' in sys.modules, 'shadowattn' in sys.modules)\n")
    assert run(environment, sys.executable, str(script)).stdout == "False False\n"


def test_without_the_package_the_line_does_nothing(environment, tmp_path):
    script = tmp_path / "lm_eval"
    script.write_text("print('ran')\n")
    left = run(environment, sys.executable, "-I", "-S", "-c", (
        f"import sys; sys.orig_argv = ['python', {str(script)!r}]; import site; site.addsitedir({str(tmp_path)!r}); print('ran')"
    ))  # fmt: skip
    assert (left.stdout, left.stderr) == ("ran\n", "")


def test_it_is_written_and_deleted_where_this_environment_looks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    for action, there in (("add", True), ("remove", False), ("remove", False)):
        monkeypatch.setattr(sys, "argv", ["harness_command", action])
        assert main() == 0
        assert (tmp_path / FILE).is_file() is there
        assert str(tmp_path / FILE) in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(InputError, match="expected a folder that can be written"):
        add(tmp_path / "nowhere")
