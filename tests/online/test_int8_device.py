"""Selection on the device leaves the keys that the host selects from the same integers."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shadowattn.errors import InputError
from shadowattn.graphs import GraphBank, GraphForm, GraphShape
from shadowattn.graphs.estimation import INPUTS
from shadowattn.kernels import choose
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.int8_device import Int8Device
from shadowattn.online.estimators.int8_graph import Int8Graph
from shadowattn.online.pipeline import Pipeline
from shadowattn.online.selection import Rule
from shadowattn.online.stages import Parts, Stages
from shadowattn.reference import select, select_key_blocks
from shadowattn.types import Requant
from tests.profiles import profile_for
from tests.selections import as_mask
from tests.tensors import qkv
from tests.tiny import tiny_model

KERNELS = choose("torch", head_dim=64, dtype=torch.float32)


def bank(form, *, keys=96, top_ks=(), group=2):
    shapes = tuple(GraphShape(count, 32, 64, keys, count if group > 1 else 1, k) for count in (1, 2) for k in top_ks or (0,))
    return GraphBank.build(profile_for(tiny_model(), 1.0), shapes, form=form)


# No integer times it lies on a half, where graphs that fuse other operations may round to either side.
MULTIPLIER = 2.000171e-3


@settings(max_examples=40, deadline=None)
@given(
    inputs=st.sampled_from(INPUTS),
    requant=st.sampled_from([None, Requant("target_requant", MULTIPLIER)]),
    query_block=st.sampled_from([1, 8]),
    key_block=st.sampled_from([1, 16]),
    rows=st.integers(1, 32),
    before=st.integers(0, 60),
    retention=st.lists(st.sampled_from([0.02, 0.2, 0.5, 1.0]), min_size=4, max_size=4),
    group=st.sampled_from([1, 2]),
    min_budget=st.sampled_from([1, 1, 20]),
    seed=st.integers(0, 20),
)
@example("int8", None, 1, 1, 12, 12, [0.02] * 4, 1, 1, 6)  # two keys of one row have the same score in float16
def test_the_device_selects_what_the_reference_does(
    inputs, requant, query_block, key_block, rows, before, retention, group, min_budget, seed
):
    form = GraphForm(inputs, requant, mask=True, pool=(query_block, key_block), indices=True)
    most = 96 // key_block
    device = Int8Device(bank(form, top_ks=(max(1, most // 4), most), group=group))
    q, k, _ = qkv(4, 2, rows, before + rows, 64, seed=seed)
    positions, retention = before + torch.arange(rows), torch.tensor(retention, dtype=torch.float64)
    rule = Rule(query_block, "max", min_budget=min_budget)
    selection = device.select(Chunk.of(q, k, retention=retention), rule, rule.lists(retention, positions), KERNELS)
    # The device ranks before a score is rounded to float16, as `int8` gives it to the host: `unit` gives the same integers whole.
    whole = "unit" if inputs == "int8" and requant is None else inputs
    scores = Int8Graph(bank(GraphForm(whole, requant), group=group)).scores(Chunk.of(q, k)).float()
    how = (scores, retention, positions + 1, query_block)
    if key_block == 1:
        expected = select(*how, "max" if query_block > 1 else "leading_query", min_budget=min_budget)
    else:
        expected = select_key_blocks(*how, key_block, min_budget)
    assert as_mask(selection, k.shape[1]).equal(expected)
    for head in range(4):
        for block in range(selection.blocks):
            listed = selection.list_of(head, block)
            assert (listed.diff() > 0).all()  # ascending, no duplicates


def test_heads_of_different_retention_take_graphs_of_different_k():
    device = Int8Device(bank(GraphForm("unit", mask=True, indices=True), top_ks=(10, 96)))
    q, k, _ = qkv(4, 2, 32, 96, 64)
    retention = torch.tensor([0.1, 0.1, 0.1, 0.5], dtype=torch.float64)
    positions, rule = 64 + torch.arange(32), Rule()
    device.select(Chunk.of(q, k, retention=retention), rule, rule.lists(retention, positions), KERNELS)
    assert device.launched == 3  # heads 0 and 1 share one; of the second group, each its own


def test_attention_is_that_of_the_host():
    q, k, v = qkv(4, 2, 32, 96, 64)
    estimators = (
        Int8Graph(bank(GraphForm())),
        Int8Device(bank(GraphForm(mask=True, indices=True), top_ks=(20,))),
    )
    chunk = Chunk.of(q, k, v, retention=0.2)
    host, device = (Pipeline().run(Stages(chunk, Parts(e, Rule(), KERNELS)), keep_lists=False) for e in estimators)
    assert host.out.equal(device.out)
    assert host.selected == device.selected


@pytest.mark.parametrize(
    ("rule", "form", "top_k", "message"),
    [
        (Rule(8, "max"), GraphForm(mask=True, indices=True), 96, "share a list over 1 rows, the rule asks for lists over 8"),
        (Rule(8, "leading_query"), GraphForm(mask=True, pool=(8, 1), indices=True), 96, "use block_score=max"),
        (Rule(sinks=4), GraphForm(mask=True, indices=True), 96, "no sinks or recent"),
        (Rule(), GraphForm(), 0, "return scores, not indices"),
        (Rule(), GraphForm(mask=True, indices=True), 5, "return up to 5 indices a row, 20 are needed"),
    ],
)
def test_what_the_graphs_do_not_know_is_refused(rule, form, top_k, message):
    device = Int8Device(bank(form, top_ks=(top_k,)))
    q, k, _ = qkv(4, 2, 32, 96, 64)
    positions = 64 + torch.arange(32)
    lists = rule.lists(torch.full((4,), 0.2, dtype=torch.float64), positions)
    with pytest.raises(InputError, match=message):
        device.select(Chunk.of(q, k), rule, lists, KERNELS)


def test_it_has_no_scores_for_decode():
    with pytest.raises(InputError, match="use decode=dense"):
        Int8Device(bank(GraphForm(mask=True, indices=True), top_ks=(5,))).scores(None)
