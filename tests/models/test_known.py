"""Known models: where each is loaded from, what rows then call it, and that every shape can be attached to. All offline."""

import json
import os
import re
import shutil
from pathlib import Path

import httpx2
import pytest
import torch
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import RepositoryNotFoundError
from omegaconf import OmegaConf

import shadowattn
from experiments.compose import CONF, composed
from shadowattn.artifacts import cache_folder
from shadowattn.errors import InputError
from shadowattn.models import load_bundled, load_known, load_random, model_shape
from shadowattn.models.known import KNOWN_MODELS
from tests.tiny import tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "own_model.md"
SMOLLM2 = KNOWN_MODELS["smollm2"]
FETCHED = "SmolLM2-135M-Instruct (Q4_1)"
# What the hub counts of each published checkpoint, with shared embeddings once.
PARAMETERS = {
    "smollm2": 134_515_008,
    "smollm2_360m": 361_821_120,
    "qwen2_0_5b": 494_032_768,
    "qwen2_1_5b": 1_543_714_304,
    "qwen3_0_6b": 596_049_920,
    "llama3_2_1b": 1_235_814_400,
    "qwen2_5_coder_1_5b": 1_543_714_304,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A tiny model in the files of a hub's repository."""
    folder = tmp_path_factory.mktemp("saved")
    tiny_model(family="llama").save_pretrained(folder)
    load_bundled().tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def hub(tmp_path, monkeypatch) -> Path:
    """An empty local cache of the hub, and one for what is fetched; the hub itself is offline."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("SHADOWATTN_CACHE", str(tmp_path / "fetched"))
    return tmp_path / "hub"


def put_in_hub_cache(saved: Path, hub: Path, *, revision: str = SMOLLM2.revision, without: str = "") -> None:
    snapshot = hub / "models--HuggingFaceTB--SmolLM2-135M-Instruct" / "snapshots" / revision
    shutil.copytree(saved, snapshot)
    if without:
        (snapshot / without).unlink()


def put_fetched(saved: Path, name: str = "smollm2") -> Path:
    return shutil.copytree(saved, Path(os.environ["SHADOWATTN_CACHE"]) / name)


@pytest.mark.parametrize("source", ["auto", "hub"])
def test_the_hubs_local_cache_comes_first_and_rows_say_so(source, saved, hub):
    put_in_hub_cache(saved, hub)
    put_fetched(saved)
    assert load_known("smollm2", source=source).name == "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.parametrize(
    "cached", [{"revision": "0" * 40}, {"without": "model.safetensors"}, {"without": "tokenizer_config.json"}]
)
def test_another_revision_or_a_part_of_one_is_not_the_model(cached, saved, hub):
    put_in_hub_cache(saved, hub, **cached)
    with pytest.raises(InputError, match="is not in the hub's local cache"):
        load_known("smollm2", source="hub")
    put_fetched(saved)
    assert load_known("smollm2").name == FETCHED


def test_fetched_weights_are_taken_where_they_are_asked_for(saved, hub):
    put_in_hub_cache(saved, hub)
    put_fetched(saved)
    assert load_known("smollm2", source="fetched").name == FETCHED


def test_fetched_weights_of_a_narrower_dtype_are_named(saved):
    put_fetched(saved)
    config = cache_folder() / "smollm2" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"}))
    assert load_known("smollm2", source="fetched").name == f"{FETCHED}, weights rounded to bfloat16"
    assert load_known("smollm2", source="fetched", dtype="bfloat16").name == FETCHED


def test_weights_in_several_files_are_cached_when_all_are(saved, hub, monkeypatch):
    put_in_hub_cache(saved, hub, without="model.safetensors")
    (snapshot,) = hub.glob("*/snapshots/*")
    tiny_model(family="llama").save_pretrained(snapshot, max_shard_size="100KB")
    shards = sorted(snapshot.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert load_known("smollm2").name == SMOLLM2.hub_id
    shards[-1].unlink()
    with pytest.raises(InputError, match="is not in the hub's local cache"):
        load_known("smollm2")


def test_neither_reached_is_one_error_with_both_remedies(hub):
    with pytest.raises(InputError) as refused:
        load_known("smollm2")
    message = str(refused.value)
    assert message.startswith(f"model=smollm2: {SMOLLM2.hub_id} at revision {SMOLLM2.revision} is not in the hub's local cache")
    assert "go online for the first run, or fetch it in a checkout with: python -m experiments.fetch smollm2" in message
    assert message.endswith("in Python shadowattn.models.load_local(FOLDER)")  # a wheel has no experiments
    assert "\n" not in message


def test_fetched_weights_do_not_stand_in_for_the_hub_unasked(saved):
    put_fetched(saved)
    with pytest.raises(
        InputError, match=r"or use model\.source=fetched after, in a checkout: python -m experiments\.fetch smollm2"
    ):
        load_known("smollm2", source="hub")


def test_a_model_that_cannot_be_fetched_names_the_other_remedy():
    with pytest.raises(
        InputError, match=r"go online for the first run, or use a folder of your own: model=local model\.path=FOLDER"
    ):
        load_known("qwen3_0_6b")
    with pytest.raises(InputError, match=r"expected a model that can be fetched .*model=smollm2.*, got one of the hub alone"):
        load_known("qwen3_0_6b", source="fetched")


def test_a_model_that_was_not_fetched_is_refused_with_the_command(tmp_path):
    with pytest.raises(InputError, match=rf"in {tmp_path}/fetched/smollm2, .* python -m experiments\.fetch smollm2"):
        load_known("smollm2", source="fetched")


@pytest.mark.parametrize("error", [httpx2.ConnectError("no route"), httpx2.ReadTimeout("slow"), OSError("down")])
def test_a_hub_that_does_not_answer_is_asked_once(error, saved, monkeypatch):
    asked = []

    def answer(self, id, *, revision, timeout):
        asked.append((id, revision))
        assert timeout <= 5
        raise error

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "model_info", answer)
    with pytest.raises(InputError, match=rf"the hub was not reached \({type(error).__name__}: {error}\)"):
        load_known("smollm2")
    put_fetched(saved)
    assert load_known("smollm2").name == FETCHED
    assert asked == [(SMOLLM2.hub_id, SMOLLM2.revision)] * 2


@pytest.mark.parametrize("refusal", [None, RepositoryNotFoundError])
def test_a_hub_that_answers_is_not_replaced_by_what_was_fetched(refusal, saved, monkeypatch):
    """Loading then fails here, since transformers is offline in tests; what counts is that nothing else is loaded instead."""

    def answer(self, id, *, revision, timeout):
        if refusal:
            raise refusal("401", response=httpx2.Response(401, request=httpx2.Request("GET", "https://hub.invalid")))

    put_fetched(saved)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: True)
    monkeypatch.setattr(HfApi, "model_info", answer)
    with pytest.raises(InputError, match=f"model {SMOLLM2.hub_id}: could not be loaded"):
        load_known("smollm2")


def test_code_of_the_hub_does_not_run_unasked():
    with pytest.raises(InputError, match=r"model\.trust_remote_code=true, .*model=random model\.shape=phonelm_0_5b"):
        load_known("phonelm_0_5b")
    with pytest.raises(InputError, match=r"mllmTeam/PhoneLM-0\.5B is not in the hub's local cache"):
        load_known("phonelm_0_5b", trust_remote_code=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "gpt5"}, r"model\.name: expected one of smollm2, smollm2_360m, .*, got 'gpt5'"),
        ({"name": "smollm2", "source": "disk"}, r"model\.source: expected one of auto, hub, fetched, got 'disk'"),
    ],
)
def test_an_unknown_name_or_source_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        load_known(**settings)


def test_an_unknown_dtype_is_no_reason_to_look_elsewhere(saved, hub):
    put_in_hub_cache(saved, hub)
    put_fetched(saved)
    with pytest.raises(InputError, match="float32, bfloat16"):
        load_known("smollm2", dtype="int4")


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_a_known_model_has_a_yaml_of_its_name(name):
    assert OmegaConf.to_container(composed([f"model={name}"]).model) == {
        "_target_": "shadowattn.models.load_known",
        "name": name,
    }


def test_the_headline_is_measured_on_the_fetched_weights_in_bfloat16():
    model = composed(["+exp=headline"]).model
    assert (model.name, model.source, model.dtype) == ("smollm2", "fetched", "bfloat16")
    assert composed(["+exp=headline", "model=qwen2_0_5b"]).model == OmegaConf.load(CONF / "model" / "qwen2_0_5b.yaml")


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_a_known_shape_is_attached(name):
    """One layer in its published width, with a small vocabulary."""
    published = KNOWN_MODELS[name].shape
    loaded = load_random(name, layers=1, vocabulary=2560, dtype="bfloat16")
    shape = model_shape(loaded.model)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (published.heads, published.kv_heads, published.head_dim)
    assert shape.context_tokens == published.context_tokens
    ids = torch.arange(100, 196)[None]
    with torch.no_grad():
        dense = loaded.model(ids).logits
        with shadowattn.attach(loaded.model, 0.2) as run:
            sparse = loaded.model(ids).logits
    assert run.counters.density == pytest.approx(0.2, abs=0.05)
    assert not torch.equal(sparse, dense)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_known_shape_has_as_many_parameters_as_the_published_checkpoint(name):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(KNOWN_MODELS[name].shape.build_config())
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


def test_the_page_lists_every_known_model():
    listed = re.findall(r"^\| `(\w+)` \| (\S+) \| (?:`(\w+)`|not pinned) \|", PAGE.read_text(), re.MULTILINE)
    assert listed == [(name, known.hub_id, (known.revision or "")[:7]) for name, known in KNOWN_MODELS.items()]
