"""A method as one value: in a model, on tensors, and the same as its parts put together by hand."""

import os
import subprocess
import sys

import pytest
import torch

import shadowattn
from shadowattn import Method
from shadowattn.errors import InputError
from shadowattn.models import replace_attention
from shadowattn.online.attention import SparseAttention
from shadowattn.online.estimators.int8_graph import Int8Graph
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.estimators.random import Random
from shadowattn.online.pipeline import Pipeline
from shadowattn.reference import dense_attention
from tests.profiles import bank_for, profile_for
from tests.tensors import qkv
from tests.tiny import tiny_model

MODEL = tiny_model()
IDS = torch.randint(0, 60, (1, 90), generator=torch.Generator().manual_seed(3))


def logits(model=MODEL):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("mode", ["batched", "overlap"])
def test_in_a_model_it_is_its_parts(mode):
    profile, bank = profile_for(MODEL, 0.2), bank_for(MODEL)
    method = Method(profile, bank, sinks=2, recent=3, min_budget=8, pipeline=Pipeline(mode))
    with method(MODEL) as run:
        found = logits()
    how = {"chunk_tokens": 32, "sinks": 2, "recent": 3, "min_budget": 8}  # 32: the height of the bank's graphs
    by_hand = SparseAttention(profile.retention, Int8Graph(bank), **how)
    with replace_attention(MODEL, by_hand):
        torch.testing.assert_close(found, logits(), atol=1e-5, rtol=1e-5)
    assert run.counters == by_hand.counters
    with method(MODEL) as again:  # a method remembers nothing
        torch.testing.assert_close(found, logits(), atol=0, rtol=0)
    assert again.counters == run.counters


@pytest.mark.parametrize("estimator", [None, "oracle", "int8", Oracle()])
def test_on_tensors_it_is_sparse_attention(estimator):
    q, k, v = qkv(4, 2, 20, 60, 64)
    made = Method(0.3, estimator=estimator, query_block=4, block_score="max").attend(q, k, v, causal_offset=40)
    how = {"causal_offset": 40, "query_block": 4, "block_score": "max", "estimator": estimator or "int8"}
    assert made.equal(shadowattn.sparse_attention(q, k, v, 0.3, **how))


def test_on_tensors_a_profile_gives_the_layers_retentions():
    q, k, v = qkv(4, 2, 20, 60, 64)
    profile = profile_for(MODEL, 0.2)
    mixed = type(profile)(**vars(profile) | {"retention": ((0.2,) * 4, (0.1, 0.5, 0.9, 1.0))})
    method = Method(mixed, estimator="oracle")
    for layer, retention in enumerate(mixed.retention):
        expected = shadowattn.sparse_attention(
            q, k, v, torch.tensor(retention, dtype=torch.float64), causal_offset=40, estimator="oracle"
        )
        torch.testing.assert_close(method.attend(q, k, v, causal_offset=40, layer=layer), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(InputError, match="layer: expected an integer of 0 … 1"):
        method.attend(q, k, v, causal_offset=40, layer=2)


def test_at_full_retention_it_is_dense():
    with Method(1.0)(MODEL):
        torch.testing.assert_close(logits(), logits(tiny_model()), atol=1e-4, rtol=1e-4)


def test_on_tensors_a_bank_its_height_and_the_other_options_count():
    q, k, v = qkv(4, 2, 60, 90, 64)
    profile, bank, seen = profile_for(MODEL, 0.2), bank_for(MODEL), []
    plain = Method(profile, bank).attend(q, k, v, causal_offset=30)  # 60 rows by graphs of 32
    assert plain.equal(Method(profile, bank, "int8").attend(q, k, v, causal_offset=30))
    overlapped = Method(profile, bank, pipeline=Pipeline("overlap"), observers=[seen.append]).attend(q, k, v, causal_offset=30)
    torch.testing.assert_close(overlapped, plain, atol=1e-5, rtol=1e-5)
    assert [one.chunk.q.shape[1] for one in seen] == [32, 28]
    dense = Method(0.2, dense_above=0.1).attend(q, k, v, causal_offset=30)
    torch.testing.assert_close(dense, dense_attention(q, k, v, causal_offset=30), atol=1e-4, rtol=1e-4)


def test_a_bank_of_another_model_is_refused():
    other = tiny_model(family="llama")
    for method in (Method(0.2, bank_for(MODEL)), Method(0.2, estimator=Int8Graph(bank_for(MODEL)), chunk_tokens=32)):
        with pytest.raises(InputError, match="bank: it was built for"), method(other):
            pass


@pytest.mark.parametrize("mode", ["batched", "grouped"])
def test_without_an_estimator_every_pipeline_runs(mode):
    with Method(0.2, pipeline=Pipeline(mode))(MODEL) as run:
        logits()
    assert run.counters.sparse_rows == 2 * 4 * 90


EACH_ALONE = """
import os
import shadowattn
import numpy, openvino, torch, transformers  # once, since they take seconds; none of them knows shadowattn

for name in shadowattn.__all__:
    if not os.fork():
        exec(f"from shadowattn import {name}")
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_every_public_name_is_there_in_a_process_of_its_own():
    done = subprocess.run([sys.executable, "-c", EACH_ALONE], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["int8", "int8_fused", "oracle", "streaming", "random"])
def test_an_estimator_by_its_name(name):
    with Method(0.2, estimator=name)(MODEL) as run:
        logits()
    assert run.counters.sparse_rows == 2 * 4 * 90


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retention": 0}, "retention"),
        ({"retention": "0.2"}, "retention: expected a number"),
        ({"bank": 3}, "bank: expected a GraphBank"),
        ({"estimator": "psychic"}, "estimator: expected one of int8, .*int8_fused, int8_graph, "),
        ({"estimator": Oracle}, "estimator: expected an object"),
        ({"estimator": "oracle", "bank": bank_for(MODEL)}, "bank: estimator=oracle does not use one"),
        ({"block_score": "mean"}, "block_score"),
        ({"sinks": -1}, "sinks"),
        ({"min_budget": 0}, "min_budget"),
        ({"kernel": "cuda"}, "kernel"),
        ({"decode": "never"}, "decode"),
        ({"dense_above": 0}, "dense_above"),
        ({"pipeline": "overlap"}, "pipeline"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"query_block": 3}, "multiple of query_block=3"),
        ({"observers": [3]}, "observers"),
    ],
)
def test_what_does_not_fit_is_refused_when_it_is_made(options, message):
    with pytest.raises(InputError, match=message):
        Method(**options)


def test_an_unknown_option_of_attach_is_named():
    with pytest.raises(InputError, match=r"attach: expected options out of .*sinks.*, got sink"):
        shadowattn.attach(MODEL, 0.2, sink=3)


def test_probabilities_of_scores_without_a_unit_are_refused_before_a_model_runs():
    with pytest.raises(InputError, match="got Random; use block_score=max"):
        shadowattn.Method(0.2, estimator=Random(0), query_block=8, block_score="probability")(tiny_model()).__enter__()
