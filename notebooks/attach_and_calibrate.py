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
# # Attach and calibrate a model of your own
#
# A Hugging Face decoder with sparse attention: first with one retention for all heads, then the paper's way, with a retention for
# each head and static INT8 graphs. The bundled model stands for yours; put your own `model` and `tokenizer` in its place.

# %%
import matplotlib.pyplot as plt
import torch

import shadowattn
from shadowattn.calibration import Windows
from shadowattn.data.text import stdlib_corpus
from shadowattn.models import load_bundled

loaded = load_bundled()
model, tokenizer = loaded.model, loaded.tokenizer
corpus = stdlib_corpus()  # Python's standard library: one part to calibrate on, another to measure on
tokens = tokenizer(corpus.heldout, return_tensors="pt", verbose=False).input_ids[:, :1024]


def loss() -> float:
    with torch.no_grad():
        return float(model(tokens, labels=tokens).loss)


# %% [markdown]
# ## One retention for every head
#
# `attach` replaces the attention inside the `with`, and only there.

# %%
dense = loss()
losses = {}
for retention in (0.05, 0.1, 0.2, 0.4):
    with shadowattn.attach(model, retention) as run:
        losses[retention] = loss() - dense
    print(f"retention {retention}: density {run.counters.density:.3f}, loss {losses[retention]:+.4f} nat")

assert loss() == dense  # undone

# %% [markdown]
# ## A retention for each head
#
# `calibrate` measures what each head loses as it keeps fewer keys, spreads the same mean over the heads, and observes the scales
# that the INT8 graphs are built for. With `folder="calibration"` everything is kept, and an interrupted measurement goes on.

# %%
windows = Windows(tokens=256, count=2)  # small, for a quick look
calibration = shadowattn.calibrate(model, tokenizer, corpus.calibration, retention=0.1, windows=windows)
profile = calibration.profile

figure, axis = plt.subplots(figsize=(4.5, 3), layout="constrained")
image = axis.imshow(torch.tensor(profile.retention), vmin=0, vmax=1)
figure.colorbar(image, label="retention")
axis.set(xlabel="head", ylabel="layer", title=f"{profile.allocator}, mean {profile.mean_retention:.3f}")

# %%
bank = calibration.bank(max_tokens=1024)
with shadowattn.attach(model, profile, bank) as run:
    own = loss() - dense
print(f"{len(bank)} graphs; loss {own:+.4f} nat with a retention for each head, {losses[0.1]:+.4f} with the same for all")

assert abs(run.counters.density - 0.1) < 0.02
