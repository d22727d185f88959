"""Which keys openvino-genai's sparse modes read, on random queries and keys."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.studies.genai_sparse import PAGE, TriShape, XAttention, density, layers_of, share, threshold_for
from experiments.studies.prefill_runners import GenAI
from shadowattn.errors import InputError
from tests.tiny import tiny_model

HEADS, KV_HEADS, HEAD_DIM, BLOCK, STRIDE = 4, 2, 16, 32, 8
TOKENS = 20 * BLOCK - 5  # more blocks than values can name at once, and the last one cut


@pytest.fixture(scope="module")
def kernel() -> XAttention:
    return XAttention(HEADS, KV_HEADS, HEAD_DIM, {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"})


def activations(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(HEADS, TOKENS, HEAD_DIM, generator=random) * 2, torch.randn(KV_HEADS, TOKENS, HEAD_DIM, generator=random)


def test_all_rows_of_a_block_read_the_same_blocks_their_own_and_the_first_among_them(kernel):
    q, k = activations()
    before = torch.ones(HEADS, TOKENS, -(-TOKENS // BLOCK), dtype=torch.bool)
    for threshold in (1.0, 0.9, 0.5, 0.1, 1e-6):
        reads = kernel.attended(q, k, threshold, BLOCK, STRIDE)
        visible = torch.arange(TOKENS)[:, None] >= BLOCK * torch.arange(before.shape[2])
        assert not reads[:, ~visible].any()
        assert not (reads & ~before).any()  # a smaller threshold reads nothing more
        before = reads
        for head in range(HEADS):
            for index, rows in enumerate(reads[head].split(BLOCK)):
                assert (rows == rows[-1]).all()
                assert rows[0, 0]
                assert rows[0, index]
        if threshold == 1:
            assert reads[:, visible].all()
    assert reads.sum() == HEADS * sum(1 + (row >= BLOCK) for row in range(TOKENS))


def test_the_block_that_takes_the_attention_is_read(kernel):
    """Head 1 looks at the keys of block 5 alone, and the others at nothing in particular."""
    q, k = torch.zeros(HEADS, TOKENS, HEAD_DIM), torch.zeros(KV_HEADS, TOKENS, HEAD_DIM)
    k[0, 5 * BLOCK : 6 * BLOCK, 0] = 4
    q[1, :, 0] = 20
    reads = kernel.attended(q, k, 0.5, BLOCK, STRIDE)
    of_head = reads[1, 6 * BLOCK :]
    assert of_head[:, 5].all()
    blocks = torch.arange(6 * BLOCK, TOKENS) // BLOCK
    assert of_head.sum() == (2 + (blocks != 5).long()).sum()  # that one, the first and their own
    assert reads[0].sum() > reads[1].sum()


def test_a_share_of_the_keys_is_counted_key_by_key(kernel):
    q, k = activations(1)
    reads = kernel.attended(q, k, 0.6, BLOCK, STRIDE)
    seen = read = 0
    for row in range(TOKENS):
        for key in range(row + 1):
            seen += HEADS
            read += int(reads[:, row, key // BLOCK].sum())
    assert share(reads, BLOCK) == pytest.approx(read / seen)
    assert 0.2 < read / seen < 0.9


def test_a_threshold_is_found_for_a_share(kernel):
    layers = [activations(2), activations(3)]

    def found(threshold):
        return density(layers, kernel, threshold, BLOCK, STRIDE)

    for keep in (0.4, 0.7):
        assert found(threshold_for(keep, found)) == pytest.approx(keep, rel=0.03)
    with pytest.raises(InputError, match=r"keep: expected at least 0\.1.*take smaller blocks"):
        threshold_for(0.05, found)


@given(pages=st.integers(0, 4), recent=st.integers(0, 6), piece=st.sampled_from([64, 96, 256]), tokens=st.integers(1, 1500))
def test_tri_shape_reads_by_its_rule(pages, recent, piece, tokens):
    """Key by key: what lies between the first pages and the recent ones, of pages that are full when a piece begins."""
    rule, kept = TriShape(pages * PAGE + 3, recent * PAGE + 5, piece), 0
    for begin in range(0, tokens, piece):
        rows = torch.arange(begin, min(begin + piece, tokens))
        full = begin // PAGE
        skipped = [page for page in range(full) if pages <= page < full - recent]
        if tokens - int(rows[-1]) - 1 < 100:
            skipped = []
        keys = torch.arange(tokens)
        left_out = torch.isin(keys // PAGE, torch.tensor(skipped, dtype=torch.int64))
        kept += int(((keys <= rows[:, None]) & ~left_out).sum())
    assert rule.density(tokens) == pytest.approx(kept / (tokens * (tokens + 1) / 2))


def test_the_recent_keys_are_chosen_for_a_share():
    rule = TriShape(128, 1920, 512)
    for keep in (0.2, 0.4):
        recent = rule.recent_for(keep, 8064)
        assert TriShape(128, recent, 512).density(8064) == pytest.approx(keep, abs=0.005)
    with pytest.raises(InputError, match=r"keep: expected at least 0\.1.*take a smaller piece"):
        rule.recent_for(0.05, 8064)


def test_queries_and_keys_are_those_of_every_layer():
    model, prompt = tiny_model(), torch.randint(0, 128, (50,), generator=torch.Generator().manual_seed(4))
    layers = layers_of(model, prompt, chunk_tokens=16)
    whole = layers_of(model, prompt, chunk_tokens=64)
    assert len(layers) == model.config.num_hidden_layers
    for (q, k), (other_q, other_k) in zip(layers, whole, strict=True):
        assert q.shape[1] == k.shape[1] == len(prompt)
        torch.testing.assert_close(q, other_q, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(k, other_k, atol=1e-4, rtol=1e-4)


def test_a_runner_keeps_a_share_of_the_keys():
    window = torch.randint(0, 128, (320,), generator=torch.Generator().manual_seed(5))
    kept = {}
    lab = SimpleNamespace(
        loaded=SimpleNamespace(model=tiny_model()), context_tokens=len(window),
        heldout=lambda: torch.stack([window, window.flip(0)]),
        units=lambda name: SimpleNamespace(get=lambda key, compute: kept.setdefault((name, key), compute())),
    )  # fmt: skip
    runner = GenAI(sparse="xattention", keep=0.5, block=32).fitted(lab)
    assert runner._density(lab, window[None]) == pytest.approx(0.5, rel=0.03)
    assert list(kept.values()) == [runner.threshold]
    assert runner.setting == f"threshold {runner.threshold:.3g}"
    assert runner.retention == 0.5
    shaped = GenAI(sparse="trishape", keep=0.88, start=32, piece=32).fitted(lab)
    assert shaped._density(lab, window[None]) == pytest.approx(0.88, abs=0.01)
    assert shaped.setting == f"{shaped.recent} recent"
    assert GenAI().fitted(lab)._density(lab, window[None]) == 1
    assert GenAI(sparse="xattention").setting == "threshold 0.8"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0.2}, "keep: expected a sparse mode"),
        ({"sparse": "xattention", "keep": 1.5}, "keep: expected a share of the keys in"),
        ({"sparse": "xattention", "block": 40}, "block: expected a multiple of 32"),
    ],
)
def test_what_cannot_be_kept_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        GenAI(**options)
