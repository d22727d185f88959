"""Banks compiled ahead: what the folder says, that its platform reads it, and that everything else is refused.

The compiler's stand-in compiles for this machine's CPU, and a device that is called NPU imports for it.
"""

import json
from dataclasses import replace
from pathlib import Path

import openvino as ov
import pytest

from shadowattn.artifacts import content_hash, write_json
from shadowattn.errors import InputError
from shadowattn.graphs import GraphBank, GraphForm, GraphShape
from shadowattn.graphs.bank import core
from shadowattn.graphs.cpu import cpu_hints
from shadowattn.graphs.npu.log import CompiledGraph
from shadowattn.graphs.storage import MANIFEST
from shadowattn.threads import thread_budget
from tests.online.test_int8_device import profile_for, tiny_model

SHAPES = (GraphShape(1, 8, 64, 16), GraphShape(1, 8, 64, 32))


class StandIn:
    version = "1.2 (build)"

    def __init__(self, error: str = ""):
        self.error, self.platforms = error, []

    def compile(self, model: ov.Model, platform: str, blob: Path) -> CompiledGraph:
        self.platforms.append(platform)
        if not self.error:
            blob.write_bytes(core().compile_model(model, "CPU", cpu_hints()).export_model().getvalue())
        return CompiledGraph(error=self.error)


def bank(**options) -> GraphBank:
    return GraphBank.build(profile_for(tiny_model(), 1.0), SHAPES, **({"form": GraphForm("int8")} | options))


@pytest.fixture
def npu(monkeypatch):
    """OpenVINO lists an NPU, of the architecture 4000, that imports as the CPU does; compiling for it fails."""
    plain = ov.Core.import_model

    def get_property(self, device, name):
        return {"DEVICE_ARCHITECTURE": "4000"}[name]

    def compile_model(self, *_):
        raise AssertionError("nothing is compiled where blobs are there")

    monkeypatch.setattr(ov.Core, "available_devices", ["CPU", "NPU"])
    monkeypatch.setattr(ov.Core, "import_model", lambda self, blob, device, hints: plain(self, blob, "CPU", cpu_hints()))
    monkeypatch.setattr(ov.Core, "get_property", get_property)
    return lambda: monkeypatch.setattr(ov.Core, "compile_model", compile_model)


def rewrite(folder, manifest):
    """A manifest that its own hash fits."""
    whole = {key: value for key, value in manifest.items() if key != "content_hash"}
    write_json(folder / MANIFEST, whole | {"content_hash": content_hash(whole)})


def test_by_default_a_bank_has_the_form_of_its_device(monkeypatch):
    monkeypatch.setattr("shadowattn.graphs.bank.check_device", lambda device: None)
    profile = profile_for(tiny_model(), 1.0)
    forms = {device: GraphBank.build(profile, SHAPES, device=device).form.inputs for device in ("CPU", "NPU", "NPU.0")}
    assert forms == {"CPU": "static", "NPU": "int8", "NPU.0": "int8"}


def test_a_compiled_bank_is_not_taken_for_a_saved_one_and_nothing_is_to_be_deleted(tmp_path):
    folder = bank().compile_ahead("4000", tmp_path / "ahead", StandIn())
    with pytest.raises(InputError, match="compiled ahead for NPU 4000; give the saved bank"):
        GraphBank.load(folder)
    with pytest.raises(InputError) as refused:
        GraphBank.load(tmp_path)
    assert "rm -r" not in str(refused.value)


def test_the_manifest_names_the_platform_and_the_compiler(tmp_path):
    compiler = StandIn()
    folder = bank().compile_ahead("4000", tmp_path / "ahead", compiler)
    manifest = json.loads((folder / MANIFEST).read_text())
    assert (manifest["platform"], manifest["compiler"]) == ("4000", "1.2 (build)")
    assert len(manifest["files"]) == len(SHAPES) == len(compiler.platforms)  # one graph of a shape serves all buckets


def test_the_platform_reads_it_and_compiles_nothing(tmp_path, npu):
    folder = bank().compile_ahead("4000", tmp_path / "ahead", StandIn())
    npu()
    assert bank(device="NPU").compile(ahead=folder) == len(SHAPES)


def test_another_platform_is_refused(tmp_path, npu):
    folder = bank().compile_ahead("5010", tmp_path / "ahead", StandIn())
    with pytest.raises(InputError, match="compiled for NPU 5010, and the device is NPU 4000"):
        bank(device="NPU").compile(ahead=folder)


def test_so_is_a_device_that_is_no_npu(tmp_path):
    folder = bank().compile_ahead("4000", tmp_path / "ahead", StandIn())
    with pytest.raises(InputError, match="compiled for NPU 4000, and the device is no NPU"):
        bank().compile(ahead=folder)


def test_so_are_another_bank_another_openvino_and_altered_files(tmp_path, npu):
    folder = bank().compile_ahead("4000", tmp_path / "ahead", StandIn())
    with pytest.raises(InputError, match="from other graphs than this bank's"):
        bank(device="NPU", form=GraphForm("int8", mask=True)).compile(ahead=folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    rewrite(folder, manifest | {"openvino": "2020.1"})
    with pytest.raises(InputError, match="compiled with OpenVINO 2020"):
        bank(device="NPU").compile(ahead=folder)
    write_json(folder / MANIFEST, manifest)
    write_json(folder / MANIFEST, manifest | {"platform": "5010"})
    with pytest.raises(InputError, match=r"manifest.json is altered"):
        bank(device="NPU").compile(ahead=folder)
    write_json(folder / MANIFEST, manifest)
    next(folder.glob("*.blob")).write_bytes(b"other")
    with pytest.raises(InputError, match="missing or altered"):
        bank(device="NPU").compile(ahead=folder)


def test_so_is_an_older_folder_by_its_schema(tmp_path, npu):
    folder = bank().compile_ahead("4000", tmp_path / "ahead", StandIn())
    manifest = json.loads((folder / MANIFEST).read_text())
    write_json(folder / MANIFEST, manifest | {"schema_version": 4})
    with pytest.raises(InputError, match="expected schema version 6, got 4"):
        bank(device="NPU").compile(ahead=folder)


def test_the_same_shapes_with_other_scales_built_in_are_refused(tmp_path, npu):
    folder = bank(form=GraphForm()).compile_ahead("4000", tmp_path / "ahead", StandIn())
    profile = profile_for(tiny_model(), 1.0)
    other = replace(profile, scales=replace(profile.scales, q_scales=tuple(2 * s for s in profile.scales.q_scales)))
    with pytest.raises(InputError, match="from other graphs"):
        GraphBank.build(other, SHAPES, device="NPU").compile(ahead=folder)


def test_a_bank_read_from_disk_has_the_graphs_of_the_one_that_was_saved(tmp_path, npu):
    folder = bank().compile_ahead("4000", tmp_path / "ahead", StandIn())
    bank().save(tmp_path / "bank")
    npu()
    assert GraphBank.load(tmp_path / "bank", device="NPU").compile(ahead=folder) == len(SHAPES)


def test_of_several_folders_the_fitting_one_is_read(tmp_path, npu):
    for name, form, platform in (("a", GraphForm(), "4000"), ("b", GraphForm("int8"), "5010"), ("c", GraphForm("int8"), "4000")):
        bank(form=form).compile_ahead(platform, tmp_path / "ahead" / name, StandIn())
    npu()
    assert bank(device="NPU").compile(ahead=tmp_path / "ahead") == len(SHAPES)
    with pytest.raises(InputError, match="of 3 there none is of these graphs and of this device, which is NPU 4000"):
        bank(device="NPU", form=GraphForm("int8", mask=True)).compile(ahead=tmp_path / "ahead")


def test_blobs_serve_every_thread_budget(tmp_path, npu):
    folder = bank().compile_ahead("4000", tmp_path / "ahead", StandIn())
    npu()
    read = bank(device="NPU")
    with thread_budget(1):
        assert read.compile(ahead=folder) == len(SHAPES)
    shape = SHAPES[0]
    read.lookup(1.0, 1.0, heads=shape.heads, rows=shape.rows, keys=shape.keys, head_dim=shape.head_dim)


def test_a_graph_that_does_not_compile_leaves_nothing(tmp_path):
    with pytest.raises(InputError, match=r"does not compile for NPU 4000 \(failed to legalize\)"):
        bank().compile_ahead("4000", tmp_path / "ahead", StandIn("failed to legalize"))
    assert not (tmp_path / "ahead").exists()
