"""No usage report leaves a process that uses the package."""

import subprocess
import sys

import pytest

CODE = """
import openvino as ov, torch
{before}
import shadowattn.graphs.core
from openvino_telemetry.utils.sender import TelemetrySender
sent = []
TelemetrySender.send = lambda self, *report: sent.append(report)
graph = ov.convert_model(torch.nn.Linear(4, 4), example_input=torch.zeros(1, 4))
import nncf
nncf.compress_weights(graph)
print(len(sent), "sent")
"""


@pytest.mark.parametrize("before", ["", "import nncf"])
def test_no_report_is_sent(before, tmp_path):
    """Whether NNCF, which makes the process's only reporter, is imported before us or after."""
    environment = {"HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}  # where nobody has answered yet
    code = CODE.format(before=before)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[-1] == "0 sent"
