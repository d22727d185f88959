"""The harness's own command knows the model once the line is in place, and other commands do not see it."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from shadowattn.errors import InputError
from shadowattn.evaluation import harness_command
from shadowattn.evaluation.harness_command import FILE, add, main


@pytest.fixture
def environment(tmp_path):
    """Python that reads `.pth` files of `tmp_path` at its start, as it does those of site-packages."""
    add(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(f"import site; site.addsitedir({str(tmp_path)!r})\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


def run(environment, *command):
    return subprocess.run(command, env=environment, capture_output=True, text=True)


FINDS = "from lm_eval.api.registry import model_registry\nprint('shadowattn' in model_registry)\n"


@pytest.mark.parametrize("name", ["bin/lm_eval", "bin/lm-eval", "other"])
def test_the_script_finds_the_model_and_others_do_not_look(environment, tmp_path, name):
    script = tmp_path / name
    script.parent.mkdir(exist_ok=True)
    script.write_text(FINDS)
    found = run(environment, sys.executable, "-u", "-W", "ignore", str(script), "lm_eval")
    assert found.stdout == f"{name != 'other'}\n", found.stderr


def test_the_whole_command_asks_the_model_for_a_retention(environment):
    command = "run", "--model", "shadowattn", "--tasks", "arc_easy", "--model_args", "pretrained=nowhere"
    assert "expected a retention" in run(environment, sys.executable, "-W", "ignore", "-m", "lm_eval", *command).stderr


def test_other_commands_load_nothing(environment, tmp_path):
    script = tmp_path / "other"
    script.write_text("import sys\nprint('lm_eval' in sys.modules, 'shadowattn' in sys.modules)\n")
    assert run(environment, sys.executable, str(script), "lm_eval").stdout == "False False\n"


def test_without_the_package_the_line_does_nothing(environment, tmp_path):
    left = run(environment, sys.executable, "-I", "-S", "-c", (
        f"import sys; sys.orig_argv = ['python', '/bin/lm_eval']; import site; site.addsitedir({str(tmp_path)!r}); print('ran')"
    ))  # fmt: skip
    assert (left.stdout, left.stderr) == ("ran\n", "")


def test_it_is_written_and_deleted_where_this_environment_looks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    for action, there, said in (("add", True, "wrote"), ("remove", False, "deleted"), ("remove", False, "there was none")):
        monkeypatch.setattr(sys, "argv", ["harness_command", action])
        assert main() == 0
        assert (tmp_path / FILE).is_file() is there
        assert said in capsys.readouterr().out


def test_what_cannot_work_is_refused(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="expected a folder that can be written"):
        add(tmp_path / "nowhere")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: SimpleNamespace(returncode=1))
    with pytest.raises(InputError, match="shadowattn: expected an installed package"):
        add(tmp_path)
    monkeypatch.setattr(harness_command, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="lm_eval: expected the package"):
        add(tmp_path)
    assert not (tmp_path / FILE).exists()
