import json
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from shadowattn.errors import InputError
from shadowattn.models import load_bundled, load_hub, load_known, load_local, load_random, model_shape
from tests.elsewhere import DEVICE, elsewhere
from tests.tiny import tiny_model


def test_bundled_model_loads_and_predicts():
    loaded = load_bundled()
    shape = model_shape(loaded.model)
    assert shape.layers >= 6
    assert shape.layers * shape.heads >= 32
    assert shape.context_tokens >= 4096
    ids = loaded.tokenizer("import os\nimport sys\n", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.isfinite(loaded.model(ids).logits).all()


def test_bundled_model_loads_in_bfloat16_as_the_same_checkpoint():
    assert load_bundled(dtype="bfloat16").fingerprint == load_bundled().fingerprint


def test_local_folder(test_data):
    loaded = load_local(str(test_data / "models" / "stories260K"))
    assert loaded.name == "stories260K"
    assert model_shape(loaded.model).head_dim == 8


@pytest.mark.parametrize("path", [None, "", "no/such/folder"])
def test_refuses_a_folder_that_is_not_there(path):
    with pytest.raises(InputError, match=r"model\.path"):
        load_local(path)


def test_refuses_a_folder_without_a_model(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(InputError, match=r"\['notes.txt'\]"):
        load_local(str(tmp_path))


def test_refuses_weights_that_are_pickles(tmp_path):
    model = tiny_model()
    model.config.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"\*\.safetensors"):
        load_local(str(tmp_path))


def test_refuses_weights_cut_short(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InputError, match="could not be loaded"):
        load_local(str(tmp_path))


def test_refuses_an_unknown_hub_id():
    with pytest.raises(InputError, match="nobody/nothing"):
        load_hub("nobody/nothing")


def test_refuses_a_hub_without_an_id():
    with pytest.raises(InputError, match=r"model\.id"):
        load_hub(None)


def test_refuses_an_unknown_dtype():
    with pytest.raises(InputError, match="float32, bfloat16"):
        load_bundled(dtype="int3")


def test_a_random_model_has_the_published_shape_and_the_same_weights_each_time():
    small = {"layers": 2, "hidden": 64, "vocabulary": 2560}
    loaded = load_random("qwen2_0_5b", **small)
    assert loaded.name == "random-qwen2_0_5b_layers2_hidden64_vocabulary2560"
    shape = model_shape(loaded.model)
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (2, 14, 2, 64)
    assert loaded.fingerprint == load_random("qwen2_0_5b", **small).fingerprint
    with pytest.raises(InputError, match="qwen2_0_5b, qwen2_1_5b"):
        load_random("gpt5")
    with pytest.raises(InputError, match="float32, bfloat16"):
        load_random("qwen2_0_5b", dtype="int4", **small)
    with pytest.raises(InputError, match=r"model\.vocabulary: expected at least the 2560 tokens of the bundled .*, got 100"):
        load_random("qwen2_0_5b", layers=2, hidden=64, vocabulary=100)


def test_the_device_is_checked_before_the_weights_are_read(monkeypatch):
    def loaded(*args, **options):
        raise AssertionError("loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loaded)
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", loaded)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    loaders = [
        load_bundled,
        partial(load_known, "qwen2_0_5b"),
        partial(load_hub, "some/model"),
        partial(load_random, "qwen2_0_5b"),
    ]
    for load in loaders:
        for device in ("gpu", "CUDA", "cuda:", "meta", ""):
            with pytest.raises(InputError, match=r"model\.device: expected cpu, cuda or cuda:NUMBER, got "):
                load(device=device)
        with pytest.raises(
            InputError, match=r"model\.device=cuda: torch .* finds no GPU; install a torch .* or use model\.device=cpu"
        ):
            load(device="cuda")


def test_a_model_too_large_for_its_device_is_refused(monkeypatch):
    def no_room(model, place):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(PreTrainedModel, "to", no_room)
    with pytest.raises(InputError, match=r"model\.device: expected room for 0\.0 GiB of weights on cpu"):
        load_random("qwen2_0_5b", layers=1, hidden=64, vocabulary=2560)


def test_loaders_put_a_model_on_its_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with elsewhere():
        loaded = load_bundled(device="cuda")
        assert {x.device for x in (*loaded.model.parameters(), *loaded.model.buffers())} == {DEVICE}
    assert loaded.fingerprint == load_bundled().fingerprint
