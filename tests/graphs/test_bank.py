import json
import math
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import openvino as ov
import pytest
import torch

from shadowattn import attach
from shadowattn.artifacts import content_hash, sha256
from shadowattn.errors import InputError
from shadowattn.graphs import GraphBank, GraphForm, GraphShape, symmetric_int8
from shadowattn.graphs.cpu import multiplies_exactly, runs_in_int8
from shadowattn.graphs.estimation import INPUTS, estimation_graph
from shadowattn.graphs.graph import Graph
from shadowattn.graphs.symmetric_int8 import absmax_scales, quantise, shifted
from shadowattn.kernels import choose
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.int8_graph import Int8Graph
from shadowattn.online.selection import Rule
from shadowattn.reference import select
from shadowattn.threads import thread_budget
from shadowattn.types import Heads, Requant, RetentionProfile, ScaleGrid
from tests.profiles import GRID, bank_for, key_offset, profile_for
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
            assert runs_in_int8(graph.model) == multiplies_exactly()


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
    assert [path.name for path in tmp_path.iterdir()] == ["bank"]


def test_saving_spares_what_is_no_bank(bank, tmp_path):
    precious = tmp_path / "thesis"
    precious.mkdir()
    (precious / "thesis.tex").write_text("ten years")
    (precious / "manifest.json").write_text('{"schema_version": 1, "stage": "scales"}')
    for folder, message in ((precious, "holds other things"), (precious / "thesis.tex", "cannot be written")):
        with pytest.raises(InputError, match=message):
            bank.save(folder)
    assert sorted(path.name for path in precious.iterdir()) == ["manifest.json", "thesis.tex"]
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    bank.save(link)
    assert link.is_symlink()
    assert len(GraphBank.load(link)) == len(bank)


@pytest.mark.parametrize("damage", ["altered", "truncated", "missing", "no manifest", "broken manifest", "list", "other version"])
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
    elif damage == "list":
        manifest.write_text("[]")
    else:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"schema_version": 99}))
    with pytest.raises(InputError, match="rebuild"):
        GraphBank.load(folder)


@pytest.mark.parametrize("change", ["pairs", "lookup", "swapped files", "doubled keys", "requant", "dropped", "openvino"])
def test_a_plausible_manifest_that_is_not_the_written_one_is_refused(bank, tmp_path, change):
    folder = bank.save(tmp_path / "bank")
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    graphs = manifest["graphs"]
    if change == "pairs":
        manifest["pairs"] = manifest["pairs"][:-1]
    elif change == "lookup":
        manifest["lookup"] = "log"
    elif change == "swapped files":
        graphs[0]["files"], graphs[1]["files"] = graphs[1]["files"], graphs[0]["files"]
    elif change == "doubled keys":
        graphs[0]["N"] *= 2
    elif change == "requant":
        manifest["form"]["requant"] = {"mode": "fixed_output", "value": 0.1}
    elif change == "dropped":
        del graphs[-1]
    else:
        manifest["openvino"] = "2019.1.0"
    path.write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="is altered; rebuild it with: rm -r"):
        GraphBank.load(folder)


def test_a_bank_of_another_openvino_is_refused(bank, tmp_path, monkeypatch):
    folder = bank.save(tmp_path / "bank")
    monkeypatch.setattr(ov, "get_version", lambda: "2099.0.0")
    with pytest.raises(InputError, match=r"built with OpenVINO .*, here is 2099\.0\.0; rebuild"):
        GraphBank.load(folder)


def test_inputs_that_fit_no_graph_are_refused(bank):
    graph = bank.lookup(0.02, 0.02, heads=2, rows=20, keys=50, head_dim=64)
    q, k, _ = qkv(2, 1, 20, 50, 64)
    for wrong in ((q[:, :0], k), (q, k[:, :0]), (q, k[..., :1]), (q.repeat(2, 1, 1), k), (q, k.repeat(1, 2, 1))):
        with pytest.raises(InputError, match="expected q and k that fit a graph of"):
            graph.run(*wrong)
    for scales in ((float("nan"), 0.02), (0.02, 0.0)):
        with pytest.raises(InputError, match=r"lookup: [qk]_scale: expected a"):
            bank.lookup(*scales, heads=2, rows=20, keys=50, head_dim=64)
    with pytest.raises(InputError, match="at least one row"):
        absmax_scales(q[:, :0])


def test_blobs_of_every_thread_budget_are_kept(tmp_path):
    def compiled(threads, lazily=False):
        made = bank_for(tiny_model())
        with thread_budget(threads):
            if lazily:
                made.lookup(0.02, 0.02, heads=1, rows=1, keys=1, head_dim=64)
            return made.compile(blobs=tmp_path), len(made)

    assert compiled(1, lazily=True) == (0, 54)
    assert [compiled(threads)[0] for threads in (2, 1, None, 2, 1, None)] == [0, 54, 0, 54, 54, 54]


def test_in_a_large_bank_graphs_of_other_lengths_hand_back_their_memory(monkeypatch):
    released = []
    monkeypatch.setattr(Graph, "release", lambda graph: released.append(graph.shape.keys))

    def use(bank):
        for keys in (30, 30, 60, 30):
            bank.lookup(0.02, 0.02, heads=1, rows=1, keys=keys, head_dim=64)

    use(bank_for(tiny_model()))
    assert released == []
    monkeypatch.setattr("shadowattn.graphs.bank._MOST_OWN_BYTES", 9 * 2 * 64 * (32 + 64 + 128) - 1)
    use(bank_for(tiny_model()))
    assert released == [32, 64]
    use(bank_for(tiny_model(), form=GraphForm("unit")))
    assert released == [32, 64]


def test_estimator_serves_every_head_from_its_own_bucket(bank):
    """Four heads of different scales on two key heads; scores equal integer arithmetic with each head's bucket."""
    q, k, _ = qkv(4, 2, 20, 50, 64)
    q, k = q * torch.tensor([0.2, 0.4, 1.0, 1.0])[:, None, None], k * torch.tensor([0.3, 1.0])[:, None, None]
    estimator = Int8Graph(bank)
    scores = estimator.scores(Chunk.of(q, k))
    q_scales, k_scales = absmax_scales(q), absmax_scales(k)
    buckets = set()
    for head in range(4):
        static = bank.pairs[bank.nearest(float(q_scales[head]), float(k_scales[head // 2]))]
        buckets.add(static)
        q8 = quantise(q[head : head + 1], torch.tensor([static[0]]))[0].double()
        k8 = quantise(k[head // 2 : head // 2 + 1], torch.tensor([static[1]]))[0].double()
        steps = scores[head].double() / (static[0] * static[1])
        torch.testing.assert_close(steps, q8 @ k8.T, atol=0.5, rtol=0)
    assert len(buckets) == 3  # heads 2 and 3 share one, and a launch
    assert estimator.launched == 3


def test_an_estimator_serves_calls_in_and_out_of_inference_mode():
    """Its memory is made in the first and used in the others."""
    q, k, _ = qkv(4, 2, 20, 50, 64)
    q = q * torch.tensor([0.2, 0.4, 1.0, 1.0])[:, None, None]  # several launches, which share memory for scores
    estimator, scores = Int8Graph(bank_for(tiny_model())), []
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            scores.append(estimator.scores(Chunk.of(q.clone(), k.clone())).clone())
    assert scores[0].equal(scores[1])
    assert scores[0].equal(scores[2])


def test_estimator_counts_heads_that_a_bucket_clips(bank):
    q, k, _ = qkv(2, 2, 20, 50, 64)
    estimator = Int8Graph(bank)
    estimator.scores(Chunk.of(0.01 * q, 0.01 * k))
    assert estimator.clipped == 0
    estimator.scores(Chunk.of(100 * q, k))
    assert estimator.clipped == 2


def test_a_bank_whose_scales_are_inputs_has_one_graph_a_shape():
    bank = bank_for(tiny_model(), form=GraphForm("unit"))
    assert len(bank) == 2 * 3
    assert bank.lookup(0.01, 0.04, heads=1, rows=1, keys=1, head_dim=64).q_scale is None


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("requant", [None, Requant("target_requant", 3e-3), Requant("fixed_output", 0.02)])
@pytest.mark.parametrize("inputs", INPUTS)
def test_every_form_of_bank_gives_the_integers_of_each_heads_bucket(inputs, requant, fold):
    """Four heads of different scales on two key heads, through the estimator; launches are partly empty."""
    bank = bank_for(tiny_model(), fold=fold, form=GraphForm(inputs, requant))
    q, k, _ = qkv(4, 2, 20, 50, 64)
    q, k = q * torch.tensor([0.2, 0.4, 1.0, 1.0])[:, None, None], k * torch.tensor([0.3, 1.0])[:, None, None]
    estimator = Int8Graph(bank)
    scores = estimator.scores(Chunk.of(q, k))
    plain = torch.float16 if inputs == "int8" else torch.float32  # what graphs return
    assert scores.dtype == (plain if requant is None else torch.int8)
    q_scales, k_scales = absmax_scales(q), absmax_scales(k)
    for head in range(4):
        pair = bank.pairs[bank.nearest(float(q_scales[head]), float(k_scales[head // 2]))]
        product = _product(q[head], k[head // 2], pair)
        if requant is None:
            step = pair[0] * pair[1] if inputs == "static" else 1 / bank.form.score_steps
            rounding = 2.0**-11 * 1.001 if inputs == "int8" else 0  # of float16
            torch.testing.assert_close(scores[head].double() / step, product, atol=0.5, rtol=rounding)
        else:
            expected = (product * requant.multiplier(*pair)).clamp(-128, 127)
            torch.testing.assert_close(scores[head].double(), expected, atol=0.501, rtol=0)


def test_one_launch_returns_the_banks_own_memory(bank):
    """Zero-copy: what OpenVINO wrote is what selection reads."""
    q, k, _ = qkv(2, 1, 20, 50, 64)
    q[1] = q[0].flip(0)  # one scale, one bucket
    estimator = Int8Graph(bank)
    with bank.exclusive.use():
        first, second = (estimator.scores(Chunk.of(q, k)) for _ in range(2))
    assert estimator.launched == 2
    assert first.data_ptr() == second.data_ptr()
    copies = [estimator.scores(Chunk.of(q, k)) for _ in range(2)]
    assert len({scores.data_ptr() for scores in (first, *copies)}) == 3


def test_scores_are_written_where_they_are_wanted(bank):
    """And stay there, whatever the bank's own memory is used for."""
    q, k, _ = qkv(2, 1, 20, 50, 64)
    q[1] = q[0].flip(0)
    estimator, chunk = Int8Graph(bank), Chunk.of(q, k)
    expected = estimator.scores(chunk)
    (group,) = estimator.launches(chunk)
    out = torch.full((estimator.room(chunk, group) + 8,), 77, dtype=torch.uint8)
    with estimator.use():
        scores = estimator.launch(chunk, group, out=out)
        estimator.scores(Chunk.of(2 * q, k))
    with pytest.raises(InputError, match="out: expected 16384 bytes of memory for what the graph computes, got 16383"):
        estimator.launch(chunk, group, out=out[: estimator.room(chunk, group) - 1])
    assert scores.equal(expected)
    assert scores.untyped_storage().data_ptr() == out.data_ptr()
    assert out[-8:].tolist() == [77] * 8
    assert estimator.scores(chunk).equal(expected)


def test_compiling_leaves_no_scores_behind():
    """Every graph runs once then, and pipelines may let all others write elsewhere."""
    bank = bank_for(tiny_model())
    written = bank._arena.block("scores")
    bank.compile()
    assert bank._arena.block("scores") is not written


@pytest.mark.parametrize(
    "form",
    [
        *(GraphForm(inputs) for inputs in INPUTS),
        GraphForm(requant=Requant("target_requant", 3e-3)),
        GraphForm(mask=True, pool=(4, 2)),
        GraphForm(mask=True, indices=True),
    ],
)
def test_what_a_graph_puts_out_is_known_without_it(form):
    shape = GraphShape(2, 8, 16, 32, 2, top_k=5 if form.indices else 0)
    model = estimation_graph(shape, form)
    assert form.output_bytes(shape) == math.prod(model.output(0).shape) * model.output(0).element_type.size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", ["static", "unit", "runtime"])
@pytest.mark.parametrize("kv_heads", [[0, 1], [1], [0, 2], [0, 0, 2]])
def test_keys_are_shifted_part_by_part_wherever_they_lie(monkeypatch, inputs, dtype, kv_heads):
    """As if `shifted` had done it for all at once: of neighbouring key heads, and of any."""
    monkeypatch.setattr(symmetric_int8, "_PART_BYTES", 4096)
    offset, count = key_offset(1, 3, 16), len(kv_heads)
    q, k, v = (x.to(dtype) for x in qkv(3, 3, 20, 50, 16))
    heads, scores = Heads(torch.arange(count), torch.tensor(kv_heads)), []
    for keys, subtracted in ((k, offset), (shifted(k, offset, 0), None)):
        grid = ScaleGrid((0.02,), (0.03,), key_offset=subtracted)
        profile = RetentionProfile(((0.2,) * count,), grid, 16, "", "", "")
        bank = GraphBank.build(profile, (GraphShape(count, 20, 16, 64),), form=GraphForm(inputs))
        scores.append(Int8Graph(bank).scores(Chunk.of(q[:count], keys, v, heads=heads)))
    assert scores[0].equal(scores[1])


def test_int8_scores_go_into_selection_as_they_are():
    bank = bank_for(tiny_model(), form=GraphForm("static", Requant("target_requant", 3e-3)))
    q, k, _ = qkv(4, 2, 20, 50, 64)
    positions, retention = torch.arange(30, 50), torch.full((4,), 0.2, dtype=torch.float64)
    rule = Rule()
    lists = rule.lists(retention, positions)
    kernels = {name: choose(name, head_dim=64, dtype=torch.float32) for name in ("torch", "auto")}
    made = {name: Int8Graph(bank).select(Chunk.of(q, k), rule, lists, of) for name, of in kernels.items()}
    assert made["torch"].indices.equal(made["auto"].indices)
    scores = Int8Graph(bank).scores(Chunk.of(q, k))
    expected = select(scores.float(), retention, positions + 1, 1, "leading_query")
    for head in range(4):
        for row in range(20):
            assert made["torch"].list_of(head, row).tolist() == expected[head, row].nonzero()[:, 0].tolist()


def test_memory_is_that_of_the_largest_graph(bank):
    """54 graphs, one set of inputs and outputs."""
    bank.compile()
    largest = GraphShape(2, 32, 64, 128, 2)
    assert bank.buffer_bytes == 4 * (2 * 32 * 64 + 128 * 64 + 2 * 32 * 128)
    assert largest in bank.shapes


def test_compiled_blobs_are_found_again(bank, tmp_path):
    folder = bank.save(tmp_path / "bank")
    counts, scores = [], []
    q, k, _ = qkv(2, 1, 20, 50, 64)
    for _ in range(2):
        loaded = GraphBank.load(folder)
        counts.append(loaded.compile(blobs=tmp_path / "blobs"))
        graph = loaded.lookup(0.02, 0.02, heads=2, rows=20, keys=50, head_dim=64)
        assert runs_in_int8(graph.model) == multiplies_exactly()
        scores.append(graph.run(q, k).clone())
    assert counts == [0, len(bank)]
    assert scores[0].equal(scores[1])


def test_blobs_are_of_one_device_driver_and_version(bank, tmp_path, monkeypatch):
    bank.compile()
    for version in ("2026.4.1", "2099.0.0"):
        monkeypatch.setattr(ov, "get_version", lambda version=version: version)
        GraphBank.load(bank.save(tmp_path / "bank")).compile(blobs=tmp_path / "blobs")
    assert len(list((tmp_path / "blobs").iterdir())) == 2


def test_blobs_of_another_bank_count_for_nothing(bank, tmp_path):
    bank_for(tiny_model(), grid=ScaleGrid((0.5,), (0.5,))).compile(blobs=tmp_path)
    other = bank_for(tiny_model(), grid=ScaleGrid((0.7,), (0.5,)))
    assert other.compile(blobs=tmp_path) == 0
    assert other.lookup(0.7, 0.5, heads=1, rows=1, keys=1, head_dim=64).q_scale == 0.7


@pytest.mark.parametrize("damage", ["altered", "missing", "broken manifest"])
def test_damaged_blobs_are_refused(tmp_path, damage):
    small = bank_for(tiny_model(), grid=ScaleGrid((0.5,), (0.5,)))
    small.compile(blobs=tmp_path)
    blob, manifest = next(tmp_path.rglob("*.blob")), next(tmp_path.rglob("manifest.json"))
    if damage == "altered":
        blob.write_bytes(blob.read_bytes()[:-1] + b"x")
    elif damage == "missing":
        blob.unlink()
    else:
        manifest.write_text("{")
    with pytest.raises(InputError, match="rebuild with: rm -r"):
        bank_for(tiny_model(), grid=ScaleGrid((0.5,), (0.5,))).compile(blobs=tmp_path)


def test_an_interrupted_export_leaves_nothing_that_counts(tmp_path, monkeypatch):
    """The manifest comes last: without it the blobs are written again."""
    monkeypatch.setattr("shadowattn.graphs.storage.write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        bank_for(tiny_model()).compile(blobs=tmp_path)
    monkeypatch.undo()
    again = bank_for(tiny_model())
    assert again.compile(blobs=tmp_path) == 0
    assert bank_for(tiny_model()).compile(blobs=tmp_path) == len(again)


def test_lookup_in_log_space_differs_where_raw_distance_misleads():
    grid = ScaleGrid((0.01, 0.04), (0.02,))
    raw, log = (bank_for(tiny_model(), grid=grid, distance=distance) for distance in ("raw", "log"))
    assert (raw.nearest(0.022, 0.02), log.nearest(0.022, 0.02)) == (0, 1)


def test_a_form_and_its_lookup_survive_saving(tmp_path):
    form = GraphForm("runtime", Requant("fixed_output", 0.02), mask=True, pool=(8, 16))
    saved = bank_for(tiny_model(), form=form, distance="log").save(tmp_path / "bank")
    loaded = GraphBank.load(saved)
    assert (loaded.form, loaded.distance) == (form, "log")
    assert json.loads((saved / "manifest.json").read_text())["graphs"][0]["q_scale"] is None


def _product(q, k, pair):
    q8, k8 = (quantise(x[None], torch.tensor([scale]))[0].double() for x, scale in zip((q, k), pair, strict=True))
    return q8 @ k8.T


def test_a_bank_for_other_scales_is_refused(tmp_path):
    """Scales of another model would clip every value, or take all for zero."""
    model = tiny_model()
    profile, bank = profile_for(model, 0.2), bank_for(model)
    tiny = ScaleGrid(*(tuple(1e-4 * scale for scale in scales) for scales in (GRID.q_scales, GRID.k_scales)))
    for grid in (tiny, ScaleGrid(GRID.q_scales, GRID.k_scales, "cross")):
        other = bank_for(model, grid=grid)
        for found in (other, GraphBank.load(other.save(tmp_path / "bank"))):
            with pytest.raises(InputError, match=r"built for the scales of tiny .*; build a bank for this profile"):
                attach(model, profile, found).__enter__()
    for found in (bank, GraphBank.load(bank.save(tmp_path / "bank"))):
        assert (found.built_for.scales, found.built_for.fingerprint) == (GRID, profile.fingerprint)
        with attach(model, profile, found):
            pass


def test_a_bank_for_another_key_offset_is_refused_by_name(tmp_path):
    """Its scales are those of other keys."""
    model, offset = tiny_model(), key_offset(2, 2, 64)
    grids = {
        "no key offset": GRID,
        str(offset): replace(GRID, key_offset=offset),
        "another": replace(GRID, key_offset=key_offset(2, 2, 64, seed=1)),
    }
    for name, grid in grids.items():
        profile, bank = profile_for(model, 0.2, grid=grid), bank_for(model, grid=grid)
        for found in (bank, GraphBank.load(bank.save(tmp_path / "bank"))):
            assert found.key_offset == grid.key_offset
            with attach(model, profile, found):
                pass
            for other in (other for other in grids if other != name):
                with pytest.raises(InputError, match="key offset") as refused:
                    attach(model, profile_for(model, 0.2, grid=grids[other]), found).__enter__()
                assert all(str(of.key_offset or "no key offset") in str(refused.value) for of in (grid, grids[other]))


def test_a_manifest_from_before_there_were_key_offsets_has_none(bank, tmp_path):
    folder = bank.save(tmp_path / "bank")
    rewritten(folder, lambda manifest: manifest["built_for"]["scales"].pop("key_offset"))
    assert GraphBank.load(folder).built_for == bank.built_for


def rewritten(folder, change):
    """The manifest changed, and vouched for again."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["content_hash"]
    change(manifest)
    path.write_text(json.dumps(manifest | {"content_hash": content_hash(manifest)}))


def exchange_files(manifest):
    first, second = manifest["graphs"][:2]
    first["files"], second["files"] = second["files"], first["files"]


MANIFESTS = {
    "no scales": (lambda m: m.pop("built_for"), "does not hold what it should"),
    "an old schema": (lambda m: m.update(schema_version=3), "expected schema version 4, got 3"),
    "a graph missing": (lambda m: m["graphs"].pop(), r"it misses h2g2_m32_d64_n128_s8, of 54 graphs"),
    "a graph twice": (lambda m: m["graphs"].append(m["graphs"][0]), "names a graph twice"),
    "a graph of no pair": (lambda m: m["graphs"][0].update(pair=9), "has no use for"),
    "another scale": (lambda m: m["graphs"][0].update(q_scale=7.0), "is not the graph of its shape and scales"),
    "files exchanged": (exchange_files, "is not the graph of its shape and scales"),
    "an unknown lookup": (lambda m: m.update(lookup="far"), "lookup: expected one of raw, log"),
    "graphs that are none": (lambda m: m.update(graphs=[1]), "does not hold what it should"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_is_not_of_a_whole_bank_is_refused(bank, tmp_path, name):
    change, reason = MANIFESTS[name]
    folder = bank.save(tmp_path / "bank")
    rewritten(folder, change)
    with pytest.raises(InputError, match=rf"{reason}.*rebuild it with: rm -r"):
        GraphBank.load(folder)


KILLED = """
import os, signal, sys
import openvino as ov
from tests.profiles import bank_for
from tests.tiny import tiny_model

save, saved = ov.save_model, []

def kill_at_the_second(*arguments, **options):
    saved.append(save(*arguments, **options))
    if len(saved) == 2:
        os.kill(os.getpid(), signal.SIGKILL)

ov.save_model = kill_at_the_second
bank_for(tiny_model()).save(sys.argv[1])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no lock that ends with its process and leaves no file")
def test_what_a_killed_save_left_goes_with_the_next_one(bank, tmp_path):
    folder = tmp_path / "bank"
    for _ in range(2):
        killed = subprocess.run([sys.executable, "-c", KILLED, str(folder)], cwd=Path(__file__).parents[2], check=False)
        assert killed.returncode == -signal.SIGKILL
    assert not folder.exists()
    assert len(list(tmp_path.iterdir())) == 2
    others = [tmp_path / ".bank-notes", tmp_path / ".bank2-shadowattn-staged-abc"]
    for other in others:
        other.mkdir()
    bank.save(folder)
    assert set(tmp_path.iterdir()) == {folder, *others}


def test_saving_spares_what_another_is_saving(bank, tmp_path, monkeypatch):
    """A whole save happens while another one writes its first graph."""
    save, inner = ov.save_model, []

    def save_within(*arguments, **options):
        save(*arguments, **options)
        if not inner:
            inner.append(True)
            bank.save(tmp_path / "bank")

    monkeypatch.setattr(ov, "save_model", save_within)
    bank.save(tmp_path / "bank")
    assert [path.name for path in tmp_path.iterdir()] == ["bank"]
    assert len(GraphBank.load(tmp_path / "bank")) == len(bank)


def test_wrong_kinds_of_arguments_are_refused(bank, tmp_path):
    profile, shapes = profile_for(tiny_model(), 1.0), bank.shapes
    for wrong in (
        lambda: GraphBank.build(0.2, shapes),
        lambda: GraphBank.build(profile, 3),
        lambda: GraphBank.build(profile, [(1, 2, 3, 4)]),
        lambda: GraphBank.build(profile, shapes, device=None),
        lambda: GraphBank.build(profile, shapes, form="static"),
        lambda: GraphBank.build(profile, shapes, distance=3),
        lambda: GraphBank.load(None),
        lambda: GraphBank.load(tmp_path / "nothing"),
        lambda: bank.save(7),
        lambda: bank.lookup("0.02", 0.02, heads=1, rows=1, keys=1, head_dim=64),
        lambda: bank.lookup(0.02, 0.02, heads=1.0, rows=1, keys=1, head_dim=64),
        lambda: bank.lookup(0.02, 0.02, heads=1, rows=True, keys=1, head_dim=64),
        lambda: bank.lookup(0.02, 0.02, heads=1, rows=1, keys=0, head_dim=64),
        lambda: bank.lookup(0.02, 0.02, heads=1, rows=1, keys=1, head_dim=64, top_k=-1),
    ):
        with pytest.raises(InputError):
            wrong()


@pytest.mark.parametrize("value", ["x", 2.0, True, 0, -1])
def test_threads_that_compile_are_counted(bank, value):
    with pytest.raises(InputError, match=r"^threads: expected an integer"):
        bank.compile(threads=value)


@pytest.mark.parametrize("value", [3, b"folder", ""])
def test_a_folder_of_blobs_is_a_path(bank, value):
    with pytest.raises(InputError, match=r"^folder: expected a path"):
        bank.compile(blobs=value)


@pytest.mark.parametrize("value", [None, "x", GRID])
def test_a_bank_is_compared_with_a_profile(bank, value):
    with pytest.raises(InputError, match=r"^profile: expected a RetentionProfile"):
        bank.check_profile(value)
