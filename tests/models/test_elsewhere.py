"""A model that is not in the CPU's memory: all that quality is measured with runs where it is, and keys stay there."""

from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

import shadowattn
from shadowattn.errors import InputError
from shadowattn.kernels import torch_kernels
from shadowattn.offline import observe_channels, observe_first_look
from shadowattn.online.attention import Attended
from shadowattn.online.estimators.double_sparsity import DoubleSparsity
from shadowattn.online.estimators.flexprefill import FlexPrefill
from shadowattn.online.estimators.h2o import H2O
from shadowattn.online.estimators.hierarchical import Hierarchical
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.estimators.int8_tensor import Int8Tensor
from shadowattn.online.estimators.loki import Loki
from shadowattn.online.estimators.mean_keys import MeanKeys
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.estimators.per_token import PerToken
from shadowattn.online.estimators.quantised import Quantised
from shadowattn.online.estimators.quest import Quest
from shadowattn.online.estimators.random import Random
from shadowattn.online.estimators.sale import Sale
from shadowattn.online.estimators.sign1 import Sign1
from shadowattn.online.estimators.sign_lsh import SignLSH
from shadowattn.online.estimators.spargeattn import SpargeAttn
from shadowattn.online.estimators.sparq import SparQ
from shadowattn.online.estimators.streaming import Streaming
from shadowattn.online.estimators.top_p import TopP
from shadowattn.online.estimators.vertical_slash import VerticalSlash
from shadowattn.online.estimators.xattention import XAttention
from shadowattn.online.pipeline import Pipeline
from shadowattn.types import KeyOffset, Requant, ScaleGrid
from tests.elsewhere import DEVICE, HAS_GPU, Copies, elsewhere, moved, pretend_device
from tests.profiles import bank_for, profile_for
from tests.tensors import qkv
from tests.tiny import tiny_model

GRID = ScaleGrid((0.01, 0.05, 0.3), (0.01, 0.05, 0.3))
OFFSET = KeyOffset([[[0.1 * (g + 1)] * 64 for g in range(2)]] * 2)
ESTIMATORS = {
    "oracle": Oracle(),
    "random": Random(3),
    "streaming": Streaming(),
    "int8_tensor": Int8Tensor(),
    "int8_tensor, key offset": Int8Tensor(key_offset=OFFSET),
    "int8_fused": Int8Fused(),
    "int8_fused, grid": Int8Fused(GRID),
    "int8_fused, key offset": Int8Fused(key_offset=OFFSET),
    "quantised": Quantised(),
    "quantised, grid": Quantised(GRID),
    "quantised, 4 bits": Quantised(bits=4),
    "quantised, smooth": Quantised(smooth=True),
    "quantised, INT8 scores": Quantised(GRID, requant=Requant("target_requant", 0.01)),
}
# Those of other work, with blocks and pages so short that a prompt of 50 tokens has several.
OTHERS = {
    "double_sparsity": lambda model: DoubleSparsity(observe_channels(model, ids(), chunk_tokens=16), 8),
    "flexprefill": lambda model: FlexPrefill(8),
    "h2o": lambda model: H2O(),
    "hierarchical": lambda model: Hierarchical(
        block_rows=8, flat_share=0.5, first_look=observe_first_look(model, ids(), chunk_tokens=16, block_rows=8)
    ),
    "loki": lambda model: Loki(observe_channels(model, ids(), chunk_tokens=16), 8),
    "mean_keys": lambda model: MeanKeys(4),
    "per_token": lambda model: PerToken(),
    "quest": lambda model: Quest(4),
    "sale": lambda model: Sale(8),
    "sign1": lambda model: Sign1(),
    "sign_lsh": lambda model: SignLSH(),
    "spargeattn": lambda model: SpargeAttn(8, 8),
    "sparq": lambda model: SparQ(8),
    "top_p": lambda model: TopP(Int8Fused(), 0.8),
    "vertical_slash": lambda model: VerticalSlash(8, 4, 4),
    "xattention": lambda model: XAttention(4, 8),
}
# What one layer may send to the CPU for one chunk: positions, counts and, where keys are gathered, the longest list of every
# block, never keys or scores.
MOST_DOWN = 200


def ids(length: int = 50) -> torch.Tensor:
    return torch.randint(0, 128, (1, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def told(model, tokens, *, copies: Copies | None = None, **options) -> torch.Tensor:
    """Logits of a prompt in two pieces and of a decoding step; `copies` are then those of the forward passes alone."""
    logits, cache = [], DynamicCache(config=model.config)
    with shadowattn.attach(model, chunk_tokens=16, **options):
        if copies is not None:
            copies.clear()
        for piece in tokens.split((28, 21, 1), 1):
            logits.append(model(input_ids=piece, past_key_values=cache).logits)
    return torch.cat(logits, 1)


def assert_close_there(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Logits of the device are the CPU's; a GPU adds up in another order, 1.4e-5 apart at most on an H100."""
    tolerance = 5e-5 if HAS_GPU else 1e-5
    torch.testing.assert_close(out.cpu(), expected, atol=tolerance, rtol=tolerance)


def lists(seen: list[Attended]) -> list[list[int]]:
    return [one.selection.indices.tolist() for one in seen if one.selection is not None]


def layer_calls(copies: Copies, pieces: int = 3, layers: int = 2) -> float:
    """Elements that came back to the CPU, for each call of a layer."""
    return sum(copies.down) / (pieces * layers)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("rule", [{"sinks": 2, "recent": 4}, {"query_block": 8, "block_score": "max"}], ids=str)
def test_every_estimator_attends_as_on_the_cpu(name, rule):
    options = {"retention": 0.3, "estimator": ESTIMATORS[name], "decode": "shared", **rule}
    model, chosen, found = tiny_model(), [], []
    expected = told(model, ids(), kernel="torch", observers=[chosen.append], **options)
    with elsewhere() as copies:
        moved(model)
        out = told(model, ids().to(DEVICE), copies=copies, observers=[found.append], **options)
        assert layer_calls(copies) < MOST_DOWN
        assert lists(found) == lists(chosen)
        assert_close_there(out, expected)


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_estimator_attends_as_on_the_cpu(name):
    model, chosen, found = tiny_model(), [], []
    expected = told(model, ids(), kernel="torch", retention=0.3, estimator=OTHERS[name](model), observers=[chosen.append])
    with elsewhere() as copies:
        moved(model)
        options = {"retention": 0.3, "estimator": OTHERS[name](model), "observers": [found.append]}
        out = told(model, ids().to(DEVICE), copies=copies, **options)
        assert layer_calls(copies) < MOST_DOWN
        assert lists(found) == lists(chosen)
        assert_close_there(out, expected)


def check_same_there(model, options: dict) -> None:
    """The outputs where the model is are those of the CPU, and no layer copies more than a few numbers back."""
    expected = told(model, ids(), kernel="torch", **options)
    with elsewhere() as copies:
        moved(model)
        out = told(model, ids().to(DEVICE), copies=copies, **options)
        assert layer_calls(copies) < MOST_DOWN
        assert_close_there(out, expected)


@pytest.mark.parametrize("block_score", ["leading_query", "pooled_query", "sum", "probability"])
@pytest.mark.parametrize("name", ["oracle", "int8_tensor", "int8_fused", "quantised, smooth"])
def test_every_way_to_share_a_list_runs_where_the_model_is(name, block_score):
    options = {"retention": 0.3, "estimator": ESTIMATORS[name], "query_block": 16, "block_score": block_score}
    model = tiny_model(family="llama", heads=4, kv_heads=1)
    check_same_there(model, options)


@pytest.mark.parametrize("dense_above", [0.5, "auto"])
@pytest.mark.parametrize("decode", ["dense", "shared"])
def test_dense_heads_run_where_the_model_is(dense_above, decode, monkeypatch):
    """Heads that go dense lie between others, so that heads are taken out of their groups and put back."""
    monkeypatch.setattr(torch_kernels, "_GPU_SCORE_BYTES", 0)  # keys are gathered, as where their scores are too many
    model = tiny_model(heads=4, kv_heads=2)
    profile = replace(profile_for(model, 0.2), retention=((0.2, 0.8, 0.3, 1.0), (1.0, 1.0, 0.2, 0.2)))
    options = {"retention": profile, "estimator": Int8Fused(profile.scales), "dense_above": dense_above, "decode": decode}
    check_same_there(model, options)


def test_nothing_but_a_model_is_needed():
    model = tiny_model()
    expected = told(model, ids(), retention=0.3, kernel="torch")
    with elsewhere():
        assert_close_there(told(moved(model), ids().to(DEVICE), retention=0.3), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "native"}, "kernel: native reads the CPU's memory.*choose kernel=auto"),
        ({"pipeline": Pipeline("serial")}, "pipeline=serial.*use pipeline=batched"),
        ({"pipeline": Pipeline("overlap"), "estimator": Oracle()}, "pipeline=overlap"),
        ({"pipeline": Pipeline("grouped"), "estimator": Oracle()}, "pipeline=grouped"),
        ({"bank": True}, "Int8Graph runs OpenVINO's graphs.*use estimator=int8_fused"),
    ],
    ids=str,
)
def test_what_reads_the_cpus_memory_is_refused_before_the_forward_pass(options, message):
    model = tiny_model()
    if options.pop("bank", False):
        options = {"bank": bank_for(model)}
    with elsewhere():
        moved(model)
        with pytest.raises(InputError, match=message), shadowattn.attach(model, 0.2, **options):
            raise AssertionError("attached")


def test_weights_on_two_devices_are_refused():
    model = tiny_model()
    with elsewhere():
        moved(model.model.layers[0])
        with pytest.raises(InputError, match="all weights on one device, got cpu, cuda"), shadowattn.attach(model, 0.2):
            raise AssertionError("attached")


def test_one_layers_tensors_attend_where_they_are():
    q, k, v = qkv(4, 2, 40, 60, 64)
    expected = shadowattn.sparse_attention(q, k, v, 0.3, causal_offset=20, kernel="torch")
    with elsewhere(), torch.no_grad():
        q, k, v = (x.to(DEVICE) for x in (q, k, v))
        out = shadowattn.sparse_attention(q, k, v, 0.3, causal_offset=20)
        assert out.device == DEVICE
        torch.testing.assert_close(out.cpu(), expected)
        with pytest.raises(InputError, match="on one device"):
            shadowattn.sparse_attention(q, k.cpu(), v, 0.3, causal_offset=20)


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU, on which the other tests ran")
def test_the_pretended_device_refuses_what_a_gpu_would():
    with pretend_device() as copies, torch.no_grad():
        x = torch.arange(6, device=DEVICE)
        for wrong in (lambda: x + torch.ones(6), lambda: x[torch.arange(2)], lambda: torch.cat([x, torch.arange(2)])):
            with pytest.raises(RuntimeError, match="on the CPU"):
                wrong()
        with pytest.raises(RuntimeError, match="numpy"):
            x.numpy()
        copies.clear()
        assert int(x.sum()) == 15
        assert (x + torch.tensor(1)).cpu().tolist() == [1, 2, 3, 4, 5, 6]
        assert copies.down == [1, 6]
