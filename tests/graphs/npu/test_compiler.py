"""The process around the compiler, by a program that stands in for it: asked, dying, hanging, missing."""

import json
import sys
from importlib.metadata import version

import pytest

from shadowattn.errors import InputError
from shadowattn.graphs.buckets import GraphShape
from shadowattn.graphs.estimation import GraphForm, estimation_graph
from shadowattn.graphs.npu import compiler
from shadowattn.graphs.npu.compiler import NpuCompiler
from shadowattn.graphs.npu.content import save_by_order
from shadowattn.graphs.npu.graphs import attention_graph

GRAPH = estimation_graph(GraphShape(1, 16, 64, 16), GraphForm("int8"))
STAND_IN = """\
#!{python}
import pathlib, sys, time
for number, line in enumerate(sys.stdin):
    model, blob, platform, tiles = (part.strip().removeprefix("Z:").replace("\\\\", "/") for part in line.split("\\t"))
    assert pathlib.Path(model).is_file()
    print("VCL Compiler Properties: ID: build, Version: 1.2, Supported", flush=True)
    if platform == "5010":
        sys.exit(134)
    if platform == "5020":
        time.sleep(60)
    pathlib.Path(blob).write_bytes(b"blob")
    print("Estimated inference latency: %d.0 us in dpu frequency 100.0 MHz" % (number + 1))
    print("\\n@result\\t0\\t0.1\\t", flush=True)
"""


@pytest.fixture
def folder(tmp_path):
    """A folder as the setup leaves it, with a program in wine's place."""
    wine = tmp_path / "wine" / "usr" / "lib" / "wine" / "wine64"
    wine.parent.mkdir(parents=True)
    wine.write_text(STAND_IN.format(python=sys.executable))
    wine.chmod(0o755)
    (tmp_path / "app").mkdir()
    (tmp_path / compiler.MANIFEST).write_text(json.dumps({"openvino": version("openvino")}))
    return tmp_path


def test_one_process_compiles_one_graph_after_the_other(folder, tmp_path):
    with NpuCompiler(folder) as made:
        first, second = made.compile(GRAPH, "3720"), made.compile(GRAPH, "4000", tmp_path / "kept.blob")
    assert (first.error, first.predicted_us, first.blob_bytes) == ("", 1, 4)
    assert second.predicted_us == 2  # the same process
    assert (tmp_path / "kept.blob").read_bytes() == b"blob"
    assert made.version == "1.2 (build)"


def test_an_outcome_is_found_again_for_the_same_graph_alone(folder):
    with NpuCompiler(folder) as made:
        first = made.compile(GRAPH, "3720")
        other = made.compile(estimation_graph(GraphShape(1, 16, 64, 32), GraphForm("int8")), "3720")
    with NpuCompiler(folder) as again:
        built_again = estimation_graph(GraphShape(1, 16, 64, 16), GraphForm("int8"))
        assert again.compile(built_again, "3720").predicted_us == first.predicted_us != other.predicted_us
        assert again.version == "1.2 (build)"
        assert again._process is None  # nothing was asked


def test_what_a_killed_or_late_compiler_leaves_is_not_kept(folder, monkeypatch):
    monkeypatch.setattr(compiler, "_TIMEOUT_S", 1.0)
    with NpuCompiler(folder) as made:
        made.compile(GRAPH, "5010")
        made.compile(GRAPH, "5020")
    assert not (folder / "outcomes").exists() or not list((folder / "outcomes").iterdir())


def test_a_compiler_that_does_not_start_is_refused(folder):
    (folder / "wine" / "usr" / "lib" / "wine" / "wine64").write_text("#!/bin/sh\nexit 1\n")
    with NpuCompiler(folder) as made, pytest.raises(InputError, match=r"does not start .*; set it up again with: rm -r"):
        made.compile(GRAPH, "3720")


def test_each_number_of_tiles_has_a_process_and_an_outcome_of_its_own(folder):
    """The compiler does not take a number back."""
    wine = folder / "wine" / "usr" / "lib" / "wine" / "wine64"
    wine.write_text(wine.read_text().replace("% (number + 1)", "% (10 * int(tiles) + number + 1)"))
    with NpuCompiler(folder) as made:
        found = [made.compile(GRAPH, "4000", tiles=tiles).predicted_us for tiles in (0, 2, 4, 2)]
        more = made.compile(GRAPH, "3720", tiles=4).predicted_us
    assert found == [1, 21, 41, 21]
    assert more == 41  # the process for 2 was ended when nothing had to be asked of it


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"openvino": "2025.1.0"}, r"that of OpenVINO 2025.1.0, here is 20.*set it up anew with: make npu-compile"),
        ([], "expected an object in"),
    ],
)
def test_a_compiler_of_another_openvino_and_a_broken_setup_are_refused(folder, manifest, message):
    (folder / compiler.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=message):
        NpuCompiler(folder)
    (folder / "wine" / "usr" / "lib" / "wine" / "wine64").unlink()
    with pytest.raises(InputError, match="wine64, found none; set it up again"):
        NpuCompiler(folder)


def test_a_program_that_finds_no_library_says_so(folder):
    wine = folder / "wine" / "usr" / "lib" / "wine" / "wine64"
    wine.write_text("#!/bin/sh\nprintf '@result\\t9\\t0\\tno library\\n'\nexec sleep 9\n")
    with NpuCompiler(folder) as made, pytest.raises(InputError, match=r"it does not start \(no library\)"):
        made.compile(GRAPH, "3720")


def test_a_graph_built_again_is_the_same_graph(tmp_path):
    shape = GraphShape(1, 16, 64, 16)
    one, two, other = (
        save_by_order(attention_graph(shape, int8=int8), tmp_path / f"{name}.xml")
        for name, int8 in (("one", False), ("two", False), ("other", True))
    )
    assert one == two != other


def test_a_compiler_that_dies_is_an_outcome_and_is_started_again(folder):
    with NpuCompiler(folder) as made:
        assert made.compile(GRAPH, "5010").error == "the compiler's process ended"
        assert made.compile(GRAPH, "3720").predicted_us == 1


def test_a_compiler_that_hangs_is_given_up(folder, monkeypatch):
    monkeypatch.setattr(compiler, "_TIMEOUT_S", 1.0)
    with NpuCompiler(folder) as made:
        assert made.compile(GRAPH, "5020").error == "no answer within 1 s"


def test_without_it_the_command_that_sets_it_up_is_named(tmp_path):
    with pytest.raises(InputError, match="set it up with: make npu-compile"):
        NpuCompiler(tmp_path / "nothing")


def test_unknown_platforms_are_refused(folder):
    with NpuCompiler(folder) as made, pytest.raises(InputError, match="expected one of 3720, 4000, 5010, 5020, got '6000'"):
        made.compile(GRAPH, "6000")
