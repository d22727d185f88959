import json

import pytest
import torch

from shadowattn.artifacts import sha256
from shadowattn.errors import InputError
from shadowattn.graphs import GraphBank, GraphShape
from shadowattn.graphs.estimation import runs_in_int8
from shadowattn.graphs.quantize import absmax_scales, quantize
from shadowattn.online.estimators.int8 import Int8
from tests.profiles import bank_for, profile_for
from tests.tensors import qkv
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def bank():
    return bank_for(tiny_model())


def test_there_is_a_graph_for_every_pair_and_shape(bank):
    assert len(bank) == 9 * 2 * 3  # pairs × launch sizes × key capacities 32, 64, 128


def test_every_compiled_graph_runs_in_int8(bank):
    bank.compile()
    for shape in bank.shapes:
        for q_scale, k_scale in bank.pairs:
            graph = bank.lookup(q_scale, k_scale, heads=shape.heads, rows=1, keys=shape.keys, head_dim=64)
            assert (graph.q_scale, graph.k_scale, graph.shape) == (q_scale, k_scale, shape)
            assert runs_in_int8(graph.model)


def test_lookup_takes_the_nearest_scales_and_the_smallest_shape(bank):
    graph = bank.lookup(0.021, 0.035, heads=2, rows=5, keys=33, head_dim=64)
    assert (graph.q_scale, graph.k_scale) == (0.02, 0.04)
    assert graph.shape == GraphShape(2, 32, 64, 64, group=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 128}, r"head_dim: the bank was built for \[64\], got 128"),
        ({"heads": 3}, r"heads: the bank launches \[1, 2\]"),
        ({"keys": 129}, "up to 32 rows on 128 keys"),
        ({"rows": 33}, "up to 32 rows on 128 keys"),
    ],
)
def test_refuses_what_it_was_not_built_for(bank, change, message):
    with pytest.raises(InputError, match=message):
        bank.lookup(0.02, 0.02, **{"heads": 1, "rows": 1, "keys": 1, "head_dim": 64} | change)


def test_no_shapes_are_refused():
    with pytest.raises(InputError, match="at least one GraphShape"):
        GraphBank.build(profile_for(tiny_model(), 1.0), ())


def test_manifest_names_every_graph(bank, tmp_path):
    folder = bank.save(tmp_path / "bank")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert len(manifest["graphs"]) == len(bank)
    for graph in manifest["graphs"]:
        assert graph["output_scale"] == graph["q_scale"] * graph["k_scale"]
        assert {"heads", "M", "K", "N"} < set(graph)
        assert all(sha256(folder / name) == digest for name, digest in graph["files"].items())
    assert not [p for p in tmp_path.iterdir() if p != folder]  # nothing staged is left


def test_a_loaded_bank_gives_the_same_scores(bank, tmp_path):
    loaded = GraphBank.load(bank.save(tmp_path / "bank"))
    assert (loaded.pairs, loaded.shapes) == (bank.pairs, bank.shapes)
    q, k, _ = qkv(2, 1, 20, 50, 64)
    scores = [b.lookup(0.02, 0.02, heads=2, rows=20, keys=50, head_dim=64).run(q, k).clone() for b in (bank, loaded)]
    assert scores[0].equal(scores[1])


def test_saving_again_replaces(bank, tmp_path):
    folder = bank.save(tmp_path / "bank")
    (folder / "left over").write_text("")
    bank.save(folder)
    assert not (folder / "left over").exists()


@pytest.mark.parametrize("damage", ["altered", "truncated", "missing", "no manifest", "broken manifest", "other version"])
def test_a_damaged_bank_is_refused(bank, tmp_path, damage):
    folder = bank.save(tmp_path / "bank")
    manifest = folder / "manifest.json"
    graph = next(folder.glob("*.xml"))
    if damage == "altered":
        graph.write_text(graph.read_text().replace("Parameter", "Paramater", 1))
    elif damage == "truncated":
        graph.write_bytes(graph.read_bytes()[:-10])
    elif damage == "missing":
        graph.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "broken manifest":
        manifest.write_text(manifest.read_text()[:-20])
    else:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"schema_version": 99}))
    with pytest.raises(InputError, match="rebuild"):
        GraphBank.load(folder)


def test_estimator_serves_every_head_from_its_own_bucket(bank):
    """Four heads of different scales on two key heads; scores equal integer arithmetic with each head's bucket."""
    q, k, _ = qkv(4, 2, 20, 50, 64)
    q, k = q * torch.tensor([0.2, 0.4, 1.0, 1.0])[:, None, None], k * torch.tensor([0.3, 1.0])[:, None, None]
    estimator = Int8(bank)
    scores = estimator.estimate(q, k, layer=0, positions=torch.arange(30, 50))
    q_scales, k_scales = absmax_scales(q), absmax_scales(k)
    buckets = set()
    for head in range(4):
        static = bank.pairs[bank.nearest(float(q_scales[head]), float(k_scales[head // 2]))]
        buckets.add(static)
        q8 = quantize(q[head : head + 1], torch.tensor([static[0]]))[0].double()
        k8 = quantize(k[head // 2 : head // 2 + 1], torch.tensor([static[1]]))[0].double()
        steps = scores[head].double() / (static[0] * static[1])
        torch.testing.assert_close(steps, q8 @ k8.T, atol=0.5, rtol=0)
    assert len(buckets) == 3  # heads 2 and 3 share one, and a launch
    assert estimator.launched == 3


def test_estimator_counts_heads_that_a_bucket_clips(bank):
    q, k, _ = qkv(2, 2, 20, 50, 64)
    estimator = Int8(bank)
    estimator.estimate(0.01 * q, 0.01 * k, layer=0, positions=torch.arange(30, 50))
    assert estimator.clipped == 0
    estimator.estimate(100 * q, k, layer=0, positions=torch.arange(30, 50))
    assert estimator.clipped == 2
