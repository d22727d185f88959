"""Settings of estimators: of another kind or out of range they are refused by name when one is made, before any work."""

import re
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from pkgutil import iter_modules

import numpy as np
import pytest
import torch

from shadowattn.errors import InputError
from shadowattn.online import estimators
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators import Estimator
from shadowattn.online.estimators.double_sparsity import DoubleSparsity
from shadowattn.online.estimators.h2o import H2O
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.estimators.int8_graph import Int8Graph
from shadowattn.online.estimators.int8_tensor import Int8Tensor
from shadowattn.online.estimators.lightning_indexer import LightningIndexer
from shadowattn.online.estimators.loki import Loki
from shadowattn.online.estimators.mean_keys import MeanKeys
from shadowattn.online.estimators.nncf import NNCF
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.estimators.per_token import PerToken
from shadowattn.online.estimators.quantised import Quantised
from shadowattn.online.estimators.quest import Quest
from shadowattn.online.estimators.sale import Sale
from shadowattn.online.estimators.sign1 import Sign1
from shadowattn.online.estimators.sign_lsh import SignLSH
from shadowattn.online.estimators.spargeattn import SpargeAttn
from shadowattn.online.estimators.sparq import SparQ
from shadowattn.online.estimators.top_p import TopP
from shadowattn.online.estimators.xattention import XAttention
from tests.online.estimators.test_channels import some
from tests.online.estimators.test_lightning_indexer import weights
from tests.online.estimators.test_rankings import DIM
from tests.test_inputs import NOT_INTEGERS, NOT_NAMES, NOT_NUMBERS

MADE = {"channels": some(), "indexer": weights(4, 32), "estimator": Oracle(), "top_p": 0.5, "bank": None}
SCALES = {"q_scales": torch.ones(4), "k_scales": torch.ones(2)}
# By the type of a setting; anything else is an object that a run makes.
WRONG = {int: [*NOT_INTEGERS, -1], float: NOT_NUMBERS, str: NOT_NAMES, bool: ["no", 0, 1, 3, 1.0, None, [True], np.array([True])]}
NO_OBJECTS = ["x", 3, True, object(), Oracle]


def kinds() -> list[type[Estimator]]:
    """Every estimator of ours."""
    modules = [import_module(f"{estimators.__name__}.{module.name}") for module in iter_modules(estimators.__path__)]
    of_modules = {kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
    return sorted((kind for kind in of_modules if issubclass(kind, Estimator) and kind is not Estimator), key=str)


SETTINGS = [(kind, one) for kind in kinds() if is_dataclass(kind) for one in fields(kind) if one.init]


@pytest.mark.parametrize(("kind", "setting"), SETTINGS, ids=[f"{kind.__name__}.{one.name}" for kind, one in SETTINGS])
def test_a_setting_of_another_kind_is_refused_by_its_name(kind, setting):
    given = SCALES if setting.name in SCALES else {}
    given = given | {one.name: MADE[one.name] for one in fields(kind) if one.init and one.default is MISSING}
    for value in WRONG.get(setting.type, NO_OBJECTS):
        with pytest.raises(InputError, match=rf"^{setting.name}: "):
            kind(**given | {setting.name: value})


def test_every_estimator_with_settings_is_looked_at():
    assert [kind.__name__ for kind in kinds() if not is_dataclass(kind)] == ["Int8", "NNCF"]  # the first stands for others
    with pytest.raises(InputError, match="nncf_graph: expected a NNCFGraph, got 'x'"):
        NNCF("x")
    assert len(SETTINGS) > 40


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DoubleSparsity(MADE["channels"], 0), f"kept: expected an integer of 1 … {DIM}, the head dimension, got 0"),
        (lambda: DoubleSparsity(MADE["channels"], DIM + 1), f"1 … {DIM}, the head dimension, got {DIM + 1}"),
        (lambda: Loki(MADE["channels"], DIM + 1), f"dims: expected an integer of 1 … {DIM}, the head dimension, got {DIM + 1}"),
        (lambda: LightningIndexer(MADE["indexer"], 0), "heads: expected an integer of 1"),
        (lambda: SparQ(0), "channels: expected an integer of 1"),
        (lambda: PerToken(9), "bits: expected an integer of 2 … 8, got 9"),
        (lambda: PerToken(1), "bits: expected an integer of 2 … 8, got 1"),
        (lambda: Quantised(bits=1), "bits: expected an integer of 2 … 8, got 1"),
        (lambda: Quantised(distance="foo"), "distance: expected one of raw, log, got 'foo'"),
        (lambda: Sign1(rotate="no"), "rotate: expected true or false, got 'no'"),
        (lambda: Sign1(scaled=3), "scaled: expected true or false, got 3"),
        (lambda: SignLSH(bits=10**9), "bits: expected an integer of 1 … 4096, got 1000000000"),
        (lambda: SpargeAttn(likeness=5), "likeness: expected a number of -1 … 1, got 5"),
        (lambda: SpargeAttn(key_block=10**9), "key_block: expected an integer of 1 … 65536, got 1000000000"),
        (lambda: MeanKeys(10**9), "page: expected an integer of 1 … 65536"),
        (lambda: Quest(10**9), "page: expected an integer of 1 … 65536"),
        (lambda: XAttention(stride=10**9), "stride: expected an integer of 1 … 65536"),
        (lambda: XAttention(block=10**9), "block: expected an integer of 1 … 65536"),
        (lambda: Sale(0), "query_block: expected an integer of 1"),
        (lambda: H2O(1.5), "recent: expected a number of 0 … 1, got 1.5"),
        (lambda: TopP(Oracle(), 0.5, loose=0.5), "loose: expected 1 or more times the budget, got 0.5"),
        (lambda: Int8Tensor(k_scales=SCALES["k_scales"]), "q_scales: expected a torch.Tensor, got None"),
        (lambda: Int8Tensor(**SCALES | {"k_scales": torch.zeros(2)}), "k_scales: expected a vector of positive finite scales"),
        (lambda: Int8Fused(**SCALES | {"q_scales": -torch.ones(4)}), "q_scales: expected a vector of positive finite scales"),
        (lambda: Int8Fused(**SCALES | {"q_scales": torch.ones(4, 1)}), "q_scales: expected a vector of positive finite scales"),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_name(make, message):
    with pytest.raises(InputError, match=re.escape(message)):
        make()


def test_numbers_of_numpy_are_settings():
    assert Quantised(bits=np.int64(4), smooth=np.True_) == Quantised(bits=4, smooth=True)
    assert SpargeAttn(likeness=np.float32(0.5)) == SpargeAttn(likeness=0.5)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (SparQ, {"channels": 65}, "channels: expected an integer of 1 … 64, the head dimension, got 65"),
        (Loki, {"dims": 0}, "dims: expected an integer of 1 … 64, the head dimension, got 0"),
        (Loki, {"dims": 65}, "dims: expected an integer of 1 … 64, the head dimension, got 65"),
        (DoubleSparsity, {"kept": -3}, "kept: expected an integer of 1 … 64, the head dimension, got -3"),
        (DoubleSparsity, {"kept": 65}, "kept: expected an integer of 1 … 64, the head dimension, got 65"),
        (LightningIndexer, {"heads": 0, "dims": 8}, "heads: expected an integer of 1"),
        (LightningIndexer, {"heads": 1, "dims": 129}, "dims: expected an integer of 1 … 128, the dimensions of a layer's keys"),
        (TopP, {"estimator": Oracle, "loose": 0.5}, "loose: expected 1 or more times the budget, got 0.5"),
        (TopP, {"estimator": Int8Graph}, "top_p: cannot prune the lists of Int8Graph"),
        (TopP, {"estimator": NNCF}, "top_p: cannot prune the lists of NNCF"),
        (TopP, {"estimator": TopP}, "top_p: cannot prune the lists of TopP"),
    ],
)
def test_a_setting_that_the_models_shape_rules_out_is_refused_before_anything_is_made(kind, settings, message):
    """For a model of two key heads of 64 dimensions; what fits it, and what somebody's own class has more, is left alone."""
    with pytest.raises(InputError, match=re.escape(message)):
        kind.check_settings(64, 2, **settings)
    kind.check_settings(64, 2, own=3)


@pytest.mark.parametrize("kind", kinds(), ids=lambda x: x.__name__)
def test_the_defaults_fit_a_model_of_64_dimensions(kind):
    given = fields(kind) if is_dataclass(kind) else ()
    kind.check_settings(64, 1, **{one.name: one.default for one in given if one.default is not MISSING})


@pytest.mark.parametrize("estimator", [MeanKeys(2**16), SpargeAttn(key_block=2**16)], ids=lambda x: type(x).__name__)
def test_pages_longer_than_the_text_take_no_memory_of_their_length(estimator):
    q, k = torch.randn(2, 3, 8), torch.randn(1, 5, 8)
    assert estimator.scores(Chunk.of(q, k)).shape == (2, 3, 5)
