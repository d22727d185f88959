import pandas as pd
import pytest
import torch

from shadowattn.online.estimators import Estimator
from shadowattn.online.estimators.h2o import H2O
from shadowattn.online.estimators.int8_tensor import Int8Tensor
from shadowattn.online.estimators.mean_keys import MeanKeys
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.estimators.quest import Quest
from shadowattn.online.estimators.sign1 import Sign1
from shadowattn.online.estimators.sign_lsh import SignLSH
from shadowattn.online.estimators.spargeattn import SpargeAttn
from shadowattn.online.estimators.top_p import TopP
from shadowattn.online.estimators.vertical_slash import VerticalSlash
from shadowattn.online.estimators.xattention import XAttention
from shadowattn.online.functional import ESTIMATORS, named_estimator
from shadowattn.reporting.rows import list_for
from shadowattn.types import EstimateCost
from tests.experiments.test_pipeline import run
from tests.experiments.test_run import tiny_folder

__all__ = ["run", "tiny_folder"]  # fixtures
OF_TENSORS = {"head_dim": 64, "dtype": torch.float32, "device": torch.device("cpu")}


def test_loss_and_cost_of_every_estimator(run):
    short = ["evaluation.windows=2", "evaluation.context_tokens=64", "graphs.chunk_tokens=32", "retentions=[0.2,0.5]"]
    short += ["evaluation.generated_tokens=8"]
    folder = run("compare_estimators", "+exp=compare_estimators", *short)
    rows = pd.read_parquet(folder / "rows.parquet")
    cost = rows[rows.metric == "estimate_mac_bits"].set_index(["method", "retention"]).value
    methods = set(rows.method) - {"dense", "npu_full"}
    assert set(cost.index) == {(method, at) for method in methods for at in (0.2, 0.5)}
    spread = 5 * 80 * 32 / 64  # quantising 80 channels of a row and of a key less its offset, over the 64 keys of a window
    assert cost["oracle", 0.2] == 4 * (cost["int8", 0.2] - spread)
    assert cost["oracle", 0.2] == 8 * (cost["bits4", 0.2] - spread - 32)  # a scale for each key
    shares = rows[rows.metric == "estimate_mac_bits"].drop_duplicates("method").set_index("method")
    assert (shares.ranked_rows["int8"], shares.ranked_rows["vertical_slash"], shares.ranked_rows["spargeattn"]) == (1, 0, 128)
    assert (shares.ranked_keys["int8"], shares.ranked_keys["quest"], shares.ranked_keys["xattention"]) == (1, 16, 128)
    assert set(rows[rows.metric == "gain_over_double_sparsity"].method) == {"sparq"}
    assert {"mean_keys", "vertical_slash", "streaming", "loki"} < set(rows[rows.metric == "gain_over_sign1"].method)
    blocks = rows[rows.metric == "block_heads"]
    assert set(blocks.method) == {"flexprefill"}
    assert blocks.value.between(0, 1).all()
    assert {"first_divergent_token", "divergent_tokens"} <= set(rows.metric)
    assert cost["random", 0.5] == cost["streaming", 0.5] == 0
    densities = rows[(rows.metric == "density") & (rows.retention == 0.2)].set_index("method").value
    assert densities.pop("top_p") == pytest.approx(densities["int8"], rel=0.3)  # on calibration text they are equal
    assert densities.max() < 1.02 * densities.min()  # as many keys, whoever ranks them
    uneven = rows[(rows.metric == "density") & rows.flag.str.contains("against int8")]
    assert set(uneven.method) <= {"top_p"}
    assert uneven.flag.str.fullmatch(r"density [+-][\d.]+% against int8").all()
    layers = rows[rows.metric == "layer_output_error"]
    assert set(layers.method) == methods | {"npu_full"}
    assert (layers.groupby(["method", "retention"]).layer.nunique() == layers.layer.nunique()).all()
    assert (layers[layers.method == "oracle"].value.groupby(layers.layer).min() > 0).all()
    assert (folder / "layers.png").is_file()
    own, dense = (rows[rows.metric == f"{kind}topk_overlap"].set_index(["method", "retention"]).value for kind in ("", "dense_"))
    assert set(dense.index) == set(own.index) == set(cost.index)
    assert (dense["oracle"] == 1).all()
    assert dense.between(0, 1).all()
    assert (dense != own)[["sign1", "streaming"]].any()
    assert (folder / "cost.png").is_file()


def test_methods_of_another_budget_are_refused(run):
    with pytest.raises(SystemExit):
        run("compare_estimators", "+exp=compare_estimators", "allocator@compare.sparq.allocator=first_layers_dense")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("compare.quest.estimator.page=0", "quest: estimator: page: expected"),
        ("compare.bits4.estimator.bits=1", "bits4: estimator: bits: expected"),
    ],
)
def test_settings_of_an_estimator_that_do_not_fit_are_refused_before_any_work(run, setting, message, capsys):
    with pytest.raises(SystemExit):
        run("compare_estimators", "+exp=compare_estimators", setting)
    said = capsys.readouterr()
    assert message in said.out + said.err
    assert "evaluate:" not in said.out


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_says_what_a_score_takes(name):
    cost = named_estimator(name, **OF_TENSORS).cost(64, 32, 96)
    assert isinstance(cost, EstimateCost)
    assert cost.mac_bits >= 8 * cost.bytes >= 0  # what is derived once takes products, and what a score reads is bytes


def test_what_a_row_and_a_key_bring_is_spread_over_the_keys_and_counts_no_bytes():
    signs = named_estimator("sign_lsh", **OF_TENSORS)
    assert signs.cost(64, 32, 96).mac_bits == 7 + 2 * 64 * 7 * 32 / 96
    assert signs.cost(64, 32, 2**20).bytes == 7 / 8
    whole, free = TopP(Oracle(), 0.9).cost(64, 32, 96), Oracle().cost(64, 32, 96)
    pruning = 64 * 4 + 32 + 2 * 64 * 32 / 96 + 2 * 32  # 4-bit keys, a scale each, quantised once, two sums
    assert whole.mac_bits - free.mac_bits == pytest.approx(pruning)


POOLED = [  # float operations that a row and a key take once, by the definition of each
    (MeanKeys(16), 64),  # the mean key
    (SpargeAttn(), 2 * 64),  # both means
    (SpargeAttn(likeness=0.5), 7 * 64),  # and the keys less their mean: that, less it, their lengths, one by one and their mean
    (Quest(16), 4 * 64),  # the lowest and the highest of a page, the positive and the negative part of a row
    (Sign1(), 2 * 64 * 6 + 64),  # two rotations of 6 steps, the mean magnitude
    (SignLSH(), 2 * 64 * 7),  # two projections on 7 directions
    (Int8Tensor(), 4 * 64),  # of both the largest magnitude, and a product with the scale
]


@pytest.mark.parametrize(("estimator", "operations"), POOLED, ids=lambda x: type(x).__name__)
def test_pooling_rotation_and_projection_count_by_one_convention(estimator, operations):
    near, far = (estimator.cost(64, 128, keys).mac_bits for keys in (2048, 2**40))
    assert near - far == pytest.approx(32 * operations / 2048)


def test_sums_for_each_row_and_key_count_as_products():
    assert VerticalSlash(64).cost(64, 128, 2048).mac_bits == 32 * (64 / 2 + 3 / 2 + 1)
    assert XAttention(8, 128).cost(64, 128, 2048).mac_bits == 32 * (64 / 8 + 2 / 64)
    assert H2O().cost(64, 128, 2048).mac_bits == 32 * (64 + 2)


def test_whom_a_list_is_for_says_heads_and_rows():
    assert [list_for("head", rows) for rows in (0, 1, 64)] == ["each head, a chunk", "each head, a row", "each head, 64 rows"]


def test_an_estimator_that_says_nothing_has_no_cost():
    class Silent(Estimator):
        def scores(self, chunk):
            raise NotImplementedError

    assert Silent().cost(64, 32, 96) is None
