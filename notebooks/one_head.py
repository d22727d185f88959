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
# # From scores to sparse output, on one head
#
# Estimate, select, attend: the three steps of sparse attention on one head, each beside its exact counterpart. Runs in a few
# seconds on a CPU. Axes: Q query rows, K keys, D head dimension.

# %%
import matplotlib.pyplot as plt
import torch

import shadowattn
from shadowattn import reference

torch.manual_seed(0)
rows, keys, dim = 64, 1024, 64
offset = keys - rows  # row i stands at position offset + i and sees the keys up to it
k = torch.randn(1, keys, dim)
q = torch.randn(1, rows, dim) + 2 * k[:, torch.randint(0, offset, (rows,))]  # every row looks for one of the keys
v = torch.randn(1, keys, dim)

# %% [markdown]
# ## Estimate
#
# Scores of all keys, exact and from INT8 values with one scale for Q and one for K. Only the order of a row's scores matters.

# %%
exact = (q @ k.mT)[0]
q_scale, k_scale = q.abs().max() / 127, k.abs().max() / 127
int8 = ((q / q_scale).round() @ (k / k_scale).round().mT)[0]  # products of integers

visible = offset + 1 + torch.arange(rows)  # keys that each row sees
hidden = torch.arange(keys) >= visible[:, None]
retentions = [0.02, 0.05, 0.1, 0.2, 0.4, 0.8]


def kept(scores: torch.Tensor, retention: float) -> torch.Tensor:
    """The keys that every row keeps, bool [Q, K], by the definition that all fast paths are held to."""
    budget = torch.full((1,), retention)
    return reference.select(scores[None].float(), budget, visible, 1, "leading_query")[0]


# %% [markdown]
# ## Select
#
# How many of the exact top-k does the INT8 estimate find, and how much of the attention falls on them?

# %%
weights = torch.softmax((exact / dim**0.5).masked_fill(hidden, -torch.inf), -1)
found, mass, mass_random = [], [], []
for retention in retentions:
    best, estimated = kept(exact, retention), kept(int8, retention)
    found.append((best & estimated).sum() / best.sum())
    mass.append((weights * estimated).sum(-1).mean())
    mass_random.append((weights * kept(torch.rand_like(exact), retention)).sum(-1).mean())

figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
axes[0].plot(retentions, found, marker="o")
axes[0].set(xlabel="retention", ylabel="share of the exact top-k found", ylim=(0.9, 1.005))
axes[1].plot(retentions, mass, marker="o", label="INT8 top-k")
axes[1].plot(retentions, mass_random, marker="s", label="random keys")
axes[1].set(xlabel="retention", ylabel="share of the attention kept")
axes[1].legend()
figure.suptitle(f"one head, n = {rows} rows, {keys} keys, random tensors")

assert min(found) > 0.9

# %% [markdown]
# ## Attend
#
# Exact attention on the selected keys alone. `sparse_attention` does all three steps; the reference says what is right.

# %%
sparse = shadowattn.sparse_attention(q, k, v, 0.2, causal_offset=offset)
exact_keys = reference.topk_attention(q, k, v, 0.2, causal_offset=offset)
dense = reference.dense_attention(q, k, v, causal_offset=offset)

for name, out in {"INT8 top-k": sparse, "exact top-k": exact_keys}.items():
    print(f"{name:12} at 20 % of the keys: relative error {(out - dense).norm() / dense.norm():.4f}")

everything = shadowattn.sparse_attention(q, k, v, 1.0, causal_offset=offset)
assert torch.allclose(everything, dense, atol=1e-5)  # retention 1 is dense attention
