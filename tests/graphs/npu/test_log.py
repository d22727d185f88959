"""What is read from the compiler's log: figures where it has them, a reason where it failed, nothing made up."""

import math

import pytest

from shadowattn.graphs.npu.log import compiler_version, read_log

COMPILED = """\
\x1b[36m[INFO] 10:00:00.001 [VCLCompilerImpl] VCL Compiler Properties: ID: 2026.9.0-7-abc, Version: 9.1, Opsets: 3\x1b[0m
  DPU groups = 4
[INFO] 10:00:00.002 [inference-execution-analysis]   Estimated inference latency: 12.50 us in dpu frequency 1850.00 MHz
[WARNING] 10:00:00.002 [inference-execution-analysis]   [Energy] The following SHAVE operations are unsupported by VPUNN, \
which can influence the estimation: [builtin_Convert, builtin_TopK]
[INFO] 10:00:00.002 [inference-execution-analysis]   [Energy] compiled Activity Factor - 0.25
[INFO] 10:00:00.003 [dump-statistics-of-task-ops]     VPUIP.NNDMA - 17 ops : Size - 3.49 MB
[INFO] 10:00:00.003 [dump-statistics-of-task-ops]     VPUIP.SW.Kernel - 5 ops
[INFO] 10:00:00.003 [dump-statistics-of-task-ops]       builtin_Convert - 3 ops
[INFO] 10:00:00.003 [dump-statistics-of-task-ops]       builtin_TopK - 2 ops
[INFO] 10:00:00.003 [dump-statistics-of-task-ops]     NCETask Operations - 8 ops
[INFO] 10:00:00.004 [convert]   Total number of FPOps: 0
[INFO] 10:00:00.004 [convert]   Total number of INTOps: 4096

@result\t0\t0.2500\t
"""
FAILED = """\
[ERROR] 10:00:00.001 [vpux-compiler] Got Diagnostic at loc(fused["n9"]) : failed to legalize operation 'bufferization.to_tensor'

@result\t3\t0.1000\tException from plugin.cpp:1: compilation failed
"""


def test_the_figures_of_a_compiled_graph():
    made = read_log(COMPILED, blob_bytes=1000)
    assert (made.error, made.compile_s, made.blob_bytes) == ("", 0.25, 1000)
    assert (made.predicted_us, made.dpu_mhz, made.fp_ops, made.int_ops, made.activity) == (12.5, 1850, 0, 4096, 0.25)
    assert made.tasks == {"dpu": 8, "shave": 5, "dma": 17}
    assert made.kernels == {"Convert": 3, "TopK": 2}
    assert made.unpriced == ("Convert", "TopK")
    assert made.dpu_groups == 4
    assert compiler_version(COMPILED) == "9.1 (2026.9.0-7-abc)"


def test_figures_that_a_platform_has_not_are_unknown():
    made = read_log("\n".join(line for line in COMPILED.splitlines() if "Total number" not in line) + "\n")
    assert all(math.isnan(x) for x in (made.fp_ops, made.int_ops, made.blob_bytes))
    assert made.predicted_us == 12.5


def test_a_graph_that_the_compiler_refuses_has_its_reason():
    made = read_log(FAILED)
    assert "failed to legalize operation" in made.error
    assert math.isnan(made.predicted_us)
    assert made.tasks is None


@pytest.mark.parametrize("cut", ["", COMPILED.split("@result")[0], "@result\t0"])
def test_a_log_without_its_last_line_is_of_a_process_that_died(cut):
    assert read_log(cut).error == "the compiler's process ended"


def test_without_a_diagnostic_the_plugins_message_is_the_reason():
    assert read_log("\n@result\t2\t0.0\tcannot read model\n").error == "cannot read model"
