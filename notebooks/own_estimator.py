# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # An estimator of your own
#
# Which keys matter, from the signs of K alone: one bit for each value. Budgets, causality, kernels and figures are there already;
# an estimator only says how important a key looks.

# %%
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import shadowattn
from shadowattn import Chunk, Estimator
from shadowattn.data.text import stdlib_corpus
from shadowattn.errors import InputError
from shadowattn.models import load_bundled


@dataclass(frozen=True)
class Sign(Estimator):
    """The product of q with the signs of k, float32 [H, Q, K]."""

    def scores(self, chunk: Chunk) -> Tensor:
        signs = chunk.k.float().sign()[chunk.heads.kv]  # of every query head's key head
        return chunk.q.float() @ signs.mT


# %% [markdown]
# `check_estimator` looks for wrong shapes, NaN, a look at later tokens, and a dependence on chunks or on the order of heads.

# %%
shadowattn.check_estimator(Sign())


@dataclass(frozen=True)
class LooksAhead(Sign):
    """What must not be: a key's score is that of the key after it, which the row may not see yet."""

    def scores(self, chunk: Chunk) -> Tensor:
        return super().scores(chunk).roll(-1, 2)


try:
    shadowattn.check_estimator(LooksAhead())
except InputError as error:
    print(error)
else:
    raise AssertionError("a look ahead was not found")

# %% [markdown]
# ## In a model
#
# Beside exact scores (`oracle`), INT8 and random keys, on the bundled model.

# %%
loaded = load_bundled()
tokens = loaded.tokenizer(stdlib_corpus().heldout, return_tensors="pt", verbose=False).input_ids[:, :1024]


def loss() -> float:
    with torch.no_grad():
        return float(loaded.model(tokens, labels=tokens).loss)


dense, retentions = loss(), (0.05, 0.1, 0.2, 0.4)
figure, axis = plt.subplots(figsize=(5, 3.2), layout="constrained")
for estimator, label in ((Sign(), "sign of K"), ("int8", "INT8"), ("oracle", "exact scores"), ("random", "random keys")):
    increases = []
    for retention in retentions:
        with shadowattn.attach(loaded.model, retention, estimator=estimator):
            increases.append(loss() - dense)
    axis.plot(retentions, increases, marker="o", label=label)
    print(label, [f"{value:+.4f}" for value in increases])
axis.set(xlabel="retention", ylabel="loss over dense (nat)", yscale="log", title=f"bundled model, n = {tokens.numel()} tokens")
axis.legend()

# %% [markdown]
# In an experiment, with every figure and table: `python -m experiments.run +exp=sweep_retention estimator._target_=mine.Sign
# method=sign` from the folder of `mine.py`; see docs/own_estimator.md.
