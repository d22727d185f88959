"""Tables about the engine."""

import math
import re
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pandas as pd

from experiments.page_tables.common import dash, full_int8, loss_cells, rows_of, source, table
from experiments.studies.roofline import bound_by, prefill_seconds

_FORMS = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "w8a8": "W8A8",
    "w8a8_smooth_50": "W8A8, smooth 0.5",
    "w8a8_smooth_65": "W8A8, smooth 0.65",
    "w8a8_smooth": "W8A8, smooth 0.8",
    "w8a8_smooth_90": "W8A8, smooth 0.9",
    "qkv_in_float32": "W8A8, smooth 0.8, Q, K and V in float32",
    "out_in_float32": "W8A8, smooth 0.8, the output projection in float32",
    "mlp_in_float32": "W8A8, smooth 0.8, gate and up in float32",
    "down_in_float32": "W8A8, smooth 0.8, the down projection in float32",
    "int8_head": "the output layer's weights in INT8",
    "w8": "INT8 weights",
    "w4": "INT4 weights, groups of 64",
}


_NPU_FULL = "study_npu_full_smollm2"  # whole attention in INT8 on the same model, from windows of its own


def blocks_smollm2() -> str:
    """What every arithmetic of the blocks loses on SmolLM2, with dense attention and with sparse attention."""
    name = "study_blocks_smollm2"
    rows = rows_of(name)
    losses, marks = loss_cells(rows)
    retentions = sorted({at for _, at in losses}, reverse=True)
    lines = [
        [words, *(losses.get((form, at), "") for at in retentions)] for form, words in _FORMS.items() if (form, 1.0) in losses
    ]
    heads = ["dense attention" if at == 1 else f"{at:.0%} of the keys" for at in retentions]
    windows = int(rows[rows.metric == "loss_increase_error"].n.iloc[0])
    n = f"n = {windows} windows, ± one standard error, paired{marks}"
    first = table(["loss above float32, nat", *heads], lines, name, n)
    return f"{first}\n\n{source(_NPU_FULL, 'every key' + full_int8(rows_of(_NPU_FULL)))}"


def look_ahead_smollm2() -> str:
    """What estimates lose that are made some layers early, on SmolLM2."""
    name = "study_look_ahead_smollm2"
    rows = rows_of(name)
    lines = []
    for ahead, of_ahead in rows.groupby("ahead"):
        by_layer = of_ahead[of_ahead.metric == "mass"].groupby(["retention", "layer"]).value.mean()
        line = [str(ahead)]
        for at in sorted(rows.retention.unique()):
            recall = of_ahead[(of_ahead.metric == "recall") & (of_ahead.retention == at)].value.mean()
            masses = by_layer[at]
            least = masses.idxmin()
            line += [f"{recall:.2f}", f"{masses.mean():.3f}", f"{masses.median():.3f}", f"{masses[least]:.2f} (layer {least})"]
        lines.append(line)
    figures = ("recall", "attention mass", "median layer", "worst layer")
    heads = [f"{figure}, {at:.0%}" for at in sorted(rows.retention.unique()) for figure in figures]
    return table(["layers ahead", *heads], lines, name, f"means over heads; n = {int(rows.n.iloc[0])} rows of queries")


def hidden_ranking_smollm2() -> str:
    """What lists made a layer early lose in the engine, and how much of their time is hidden, on SmolLM2.

    Beside it the recall of lists ranked a layer early by exact products, mean over the layers that look ahead.
    """
    name, exact = "study_hidden_ranking_smollm2", "study_look_ahead_smollm2"
    rows, early = rows_of(name), rows_of(exact)
    early = early[(early.metric == "recall") & (early.ahead == 1)]
    cells = rows.set_index(["first_layer", "retention", "metric"]).value.sort_index()
    retentions, lines = sorted(rows.retention.unique()), []
    for first in sorted(rows.first_layer.unique()):
        line = [f"from layer {first} on" if first else "none"]
        for at in retentions:
            of = cells[first, at]
            loss = f"{of.loss_increase:+.3f} ± {of.loss_increase_error:.3f}" if first else ""
            found = early[(early.layer >= first) & (early.retention == at)].value.mean()
            line += [f"{found:.2f}" if first else "", loss, f"{of.prefill:.2f}", f"{of.hidden:.0%}" if first else ""]
        lines.append(line)
    figures = ("recall", "loss above its own lists, nat", "seconds of a prefill", "of the ranking's time hidden")
    heads = [f"{figure}, {at:.0%} of the keys" for at in retentions for figure in figures]
    rounds, windows = (int(rows.n[rows.metric == metric].iloc[0]) for metric in ("prefill", "loss_increase_error"))
    n = f"n = {windows} windows, ± one standard error, paired; seconds: medians of {rounds} interleaved rounds"
    recall = f"recall, means over heads and the layers that look ahead; n = {int(early.n.iloc[0])} rows of queries"
    others = [source(exact, recall), source(_NPU_FULL, "every key" + full_int8(rows_of(_NPU_FULL)))]
    return "\n\n".join([table(["lists ahead", *heads], lines, name, n), *others])


_ANSWER = {
    "time_to_first_token": ("seconds to the first token", 1, 2),
    "tokens_per_second": ("tokens a second after it", 1, 1),
    "reader_tokens_per_second": ("tokens a second that a person reads", 1, 1),
    "prefill_cpu_seconds": ("CPU seconds to the first token", 1, 1),
    "decode_cpu_seconds": ("CPU seconds after it", 1, 1),
    "cpu_share": ("cores busy", 1, 2),
    "peak_memory": ("memory of the process at most, MB", 1e-6, 0),
    "kv_cache": ("KV cache, MB", 1e-6, 0),
    "density": ("share of the keys that the prompt attended to, %", 100, 1),
    "drafted_tokens": ("drafted tokens", 1, 0),
    "accepted_tokens": ("drafts that stayed", 1, 0),
    "compile_seconds": ("seconds of compiling, before", 1, 2),
}
_ANSWERS = {
    "every key": "generate_8k_dense",
    "every key, a graph for each layer": "generate_8k_constants",
    "every key, drafts": "generate_8k_drafts",
    "10 % of the keys": "generate_8k_tenth",
    "10 % of the keys, a shared list in decoding": "generate_8k_shared",
}
_ROOFS, _WITHOUT_TILES = "roofline_amx", "roofline_avx512"
_COPIED = {"handed_bytes": 1e-6, "copies_times_step": 100.0}
_LIMIT = 0.05  # nat above dense attention, up to which XAttention's time is a target

_RUNNERS = {
    "transformers": "transformers, float32",
    "transformers_bfloat16": "transformers, bfloat16",
    "engine_float32": "engine, float32, dense",
    "engine_w8a8": "engine, W8A8, dense",
    "engine_w8a8_20": "engine, W8A8, 20 % of the keys",
    "engine_w8a8_15": "engine, W8A8, 15 % of the keys",
    "engine_w8a8_10": "engine, W8A8, 10 % of the keys",
    "engine_w8a8_5": "engine, W8A8, 5 % of the keys",
    "engine_w8a8_10_flat": "engine, W8A8, 10 % of the keys, by a flat estimate",
    "engine_w8a8_down": "engine, W8A8 but the down projection in float32, dense",
    "engine_w8a8_down_15": "engine, W8A8 but the down projection in float32, 15 % of the keys",
    "stateful": "OpenVINO, stateful graph, float32",
    "genai_own": "openvino-genai, exported, dense",
    "genai_own_int8": "openvino-genai, exported, INT8 weights, dense",
    "genai_own_int8_xattention_20": "openvino-genai, exported, INT8 weights, XAttention for 20 % of the keys",
    "genai_own_int8_trishape_20": "openvino-genai, exported, INT8 weights, tri-shape for 20 % of the keys",
    "genai_own_xattention": "openvino-genai, exported, XAttention",
    "genai_own_xattention_20": "openvino-genai, exported, XAttention for 20 % of the keys",
    "genai_own_xattention_15": "openvino-genai, exported, XAttention for 15 % of the keys",
    "genai_own_xattention_10": "openvino-genai, exported, XAttention for 10 % of the keys",
    "genai_own_xattention_5": "openvino-genai, exported, XAttention for 5 % of the keys",
    "genai_own_trishape_20": "openvino-genai, exported, tri-shape for 20 % of the keys",
    "genai_own_trishape_10": "openvino-genai, exported, tri-shape for 10 % of the keys",
    "genai": "openvino-genai, GGUF, dense",
    "genai_xattention_20": "openvino-genai, GGUF, XAttention for 20 % of the keys",
    "genai_xattention_15": "openvino-genai, GGUF, XAttention for 15 % of the keys",
    "genai_xattention_10": "openvino-genai, GGUF, XAttention for 10 % of the keys",
    "llama_cpp": "llama.cpp, GGUF",
}
_LOOKED = {name: f"{_RUNNERS[name]}, after a first look" for name in (
    *(f"engine_w8a8_{keys}" for keys in (20, 15, 10, 5)), "engine_w8a8_down_15",
)}  # fmt: skip
_WRITTEN = {"llama_cpp": "llama.cpp, a file of 8-bit weights"}


def generate_8k() -> str:
    """Where the time of a long prompt and of an answer goes in the engine: dense, by a graph a layer, drafted, and sparse."""
    found = {words: rows_of(name) for words, name in _ANSWERS.items()}
    lines = []
    for phase in ("prefill", "decode"):
        for stage in dict.fromkeys(found["every key"].stage[found["every key"].phase == phase]):
            of = (rows[(rows.phase == phase) & (rows.stage == stage)].value.item() for rows in found.values())
            lines.append([f"{phase}: {stage}, s", *(f"{seconds:.2f}" for seconds in of)])
    for metric, (words, scale, digits) in _ANSWER.items():
        of = (rows[rows.metric == metric].value.item() for rows in found.values())
        lines.append([words, *(f"{scale * value:.{digits}f}" for value in of)])
    first = found["every key"].iloc[0]
    n = f"one prompt of {first.prompt_tokens} tokens and {first.new_tokens} new ones, one run each"
    first_name, *others = _ANSWERS.values()
    sources = [source(name, "one column") for name in others]
    return "\n\n".join([table(["an answer", *_ANSWERS], lines, first_name, n), *sources])


def ttft_all() -> str:
    """Seconds to the first token of every runner on SmolLM2, sparse ones at measured shares of the keys."""
    return _ttft("ttft_all", _LOOKED)


def ttft_twentieth() -> str:
    """XAttention and the engine's lists at a twentieth of the keys."""
    return _ttft("ttft_twentieth", _LOOKED)


def ttft_peers_amx() -> str:
    """The same on a processor with matrix units."""
    return _ttft("ttft_peers_amx", _LOOKED)


def ttft_gguf_amx() -> str:
    """Peers that read weights of 4 and 8 bits, on a processor with matrix units."""
    return _ttft("ttft_gguf_amx", _LOOKED)


def ttft_qwen2_0_5b() -> str:
    """The same on random weights of Qwen2-0.5B's shape, without losses."""
    return _ttft("ttft_qwen2_0_5b", _LOOKED, losses=False)


def ttft_qwen2_1_5b() -> str:
    """The same on random weights of half of Qwen2-1.5B's layers."""
    return _ttft("ttft_qwen2_1_5b", _LOOKED, losses=False)


def ttft_qwen2_0_5b_trishape() -> str:
    """The engine beside openvino-genai's tri-shape at the same shares of the keys, on random weights of Qwen2-0.5B's shape."""
    return _ttft("ttft_qwen2_0_5b_trishape", _LOOKED, losses=False)


def ttft_shapes_qwen2_1_5b() -> str:
    """Seven layers of Qwen2-1.5B's shape with random weights, by the same runners."""
    return _ttft("ttft_shapes_qwen2_1_5b", _LOOKED | _WRITTEN, losses=False)


def ttft_shapes_qwen2_0_5b() -> str:
    """The engine and all peers, at the same shares of the keys, on random weights of Qwen2-0.5B's shape."""
    return _ttft("ttft_shapes_qwen2_0_5b", _LOOKED | _WRITTEN, losses=False)


def ttft_chunks() -> str:
    """Seconds to the first token by the tokens of the engine's chunks, beside openvino-genai's dense attention."""
    return _chunks("ttft_chunks")


def ttft_chunks_avx512() -> str:
    """The same on a processor without matrix units."""
    return _chunks("ttft_chunks_avx512")


def _chunks(name: str) -> str:
    rows = rows_of(name)
    first = rows[rows.metric == "time_to_first_token"].set_index(["method", "context_tokens"]).value
    lengths = sorted(first.index.unique("context_tokens"))
    lines = [
        [f"{chunk}", *(f"{first[f'{keys}_{chunk}', tokens]:.2f}" for keys in ("dense", "tenth") for tokens in lengths)]
        for chunk in (128, 256, 512, 2048)
    ]
    peer = (f"{first['genai_own', tokens]:.2f}" for tokens in lengths)
    lines.append(["openvino-genai, in one piece", *peer, *("" for _ in lengths)])
    heads = [f"{keys}, {tokens} tokens, s" for keys in ("dense", "10 % of the keys") for tokens in lengths]
    n = f"medians of {int(rows.n[rows.metric == 'time_to_first_token'].iloc[0])} interleaved rounds"
    return table(["tokens of a chunk", *heads], lines, name, n)


_EQUAL_LOSS = (  # rows, chunks and processor, and the dense form of the peer
    ("ttft_all", "4096", "genai_own"),
    ("ttft_all", "4096, XAttention on the GGUF file", "genai"),
    ("ttft_peers_amx", "2048, matrix units", "genai_own"),
    ("ttft_gguf_amx", "2048, matrix units, XAttention on the GGUF file", "genai"),
)


def ttft_equal_loss() -> str:
    """The engine beside XAttention at equal loss, above each one's dense attention: lengths of chunks, processors, files."""
    lines = []
    for name, chunk, dense_peer in _EQUAL_LOSS:
        rows = rows_of(name)
        losses = rows[rows.metric == "loss_increase"].set_index("method").value
        first = rows[(rows.metric == "time_to_first_token") & (rows.context_tokens == rows.context_tokens.max())]
        seconds = first.set_index("method").value
        peers, engine = (
            pd.DataFrame({"loss": losses[names] - losses[dense], "seconds": seconds[names]}).sort_values("loss")
            for dense, names in (
                (dense_peer, [one for one in losses.index if re.fullmatch(rf"{dense_peer}_xattention_\d+", one)]),
                ("engine_w8a8", [one for one in losses.index if re.fullmatch(r"engine_w8a8_\d+", one)]),
            )
        )
        at_limit = {"loss": _LIMIT, "seconds": np.interp(_LIMIT, engine.loss, engine.seconds)}
        for method, loss, taken in [*engine.itertuples(), ("", *at_limit.values())]:
            line = [chunk, f"{method.split('_')[-1]}%" if method else "on a line", f"{loss:+.3f}", f"{taken:.2f}"]
            if peers.loss.min() <= loss <= peers.loss.max():
                equal = float(np.interp(loss, peers.loss, peers.seconds))
                line += [f"{equal:.2f}", f"{equal / taken:.2f}"]
            lines.append(line if len(line) > 4 else [*line, "", ""])
    heads = ["tokens of a chunk", "of the keys", "loss above its own dense attention, nat", "seconds"]
    heads += ["XAttention at this loss, s", "times faster"]
    n = "8064 tokens; between two measured losses seconds lie on a line"
    others = [source(name, "the same") for name in dict.fromkeys(name for name, *_ in _EQUAL_LOSS) if name != "ttft_all"]
    return "\n\n".join([table(heads, lines, "ttft_all", n), *others])


def _ttft(name: str, others: Mapping[str, str] = MappingProxyType({}), *, losses: bool = True) -> str:
    """Seconds to the first token of every runner, what follows it, and what each loses.

    `others`: labels that replace those of `_RUNNERS`.
    """
    rows = rows_of(name)
    first = rows[rows.metric == "time_to_first_token"].set_index(["method", "context_tokens"]).value
    lengths = sorted(rows.context_tokens[rows.metric == "time_to_first_token"].unique())
    at = rows[rows.context_tokens == lengths[-1]].set_index(["metric", "method"]).value
    lost, errors = (rows[rows.metric == metric].set_index("method") for metric in ("loss_increase", "loss_increase_error"))
    density = rows[rows.metric == "density"].set_index("method").value
    labels, lines = _RUNNERS | others, []
    if unknown := set(lost.index) - labels.keys():
        raise ValueError(f"{name}: expected runners that have a label, got {', '.join(sorted(unknown))}; add theirs to _RUNNERS")
    for runner, words in labels.items():
        if runner not in lost.index:
            continue
        seconds = [f"{first[runner, length]:.2f}" for length in lengths]
        rest = [f"{at[metric, runner]:.1f}" for metric in ("cpu_seconds", "tokens_per_second")]
        rest += [f"{at[metric, runner] / 1e6:.0f}" for metric in _MEMORY if metric in at]
        rest += [f"{density[runner]:.1%}"] if len(density) else []
        words += ", output layer in INT8" if lost.get("output_layer", {}).get(runner) == "int8" else ""
        rest += [f"{lost.value[runner]:+.3f} ± {errors.value[runner]:.3f}"] if losses else []
        lines.append([words, *seconds, *rest])
    header = ["seconds to the first token", *(f"{length} tokens" for length in lengths)]
    header += [f"CPU seconds, {lengths[-1]}", "tokens a second after it"]
    header += [words for metric, words in _MEMORY.items() if metric in at]
    rounds, windows = int(rows.n[rows.metric == "time_to_first_token"].iloc[0]), int(errors.n.iloc[0])
    tokens = int(lost.n.iloc[0]) // windows + 1
    header += [f"of the keys, {tokens}"] if len(density) else []
    header += [f"loss above {_base(rows, others)}, nat"] if losses else []
    n = f"medians of {rounds} interleaved rounds"
    n += f"; losses of {windows} windows of {tokens} tokens, ± one standard error, paired" if losses else ", random weights"
    return table(header, lines, name, n)


_MEMORY = {"reading_bytes": "MB for a prompt", "process_peak_bytes": "MB of the process"}


def _base(rows: pd.DataFrame, others: Mapping[str, str]) -> str:
    """What the others are held to."""
    times = rows[rows.metric == "times_faster"].groupby("method").value
    base = next(method for method, values in times if (values == 1).all())
    return "transformers" if base.startswith("transformers") else (_RUNNERS | others)[base]


def roofline_amx() -> str:
    """Time of every stage in all layers, the share of its roof that it reaches, and which roof that is."""
    return _roofline(_ROOFS)


def roofline_avx512() -> str:
    """The same on a processor without matrix units."""
    return _roofline(_WITHOUT_TILES)


def _roofline(name: str) -> str:
    rows = rows_of(name)
    peaks, stages = rows[rows.method == "machine"], rows[rows.stage != ""]
    cells = stages.set_index(["metric", "phase", "batch", "context_tokens", "stage"]).value
    columns = list(stages[["phase", "batch", "context_tokens"]].drop_duplicates().itertuples(index=False, name=None))
    columns = [column for column in columns if column[1] in (1, stages.batch.max())]
    counted = stages.drop_duplicates(["phase", "batch", "context_tokens", "stage"])
    counted = counted.set_index(["phase", "batch", "context_tokens", "stage"])
    lines = []
    for stage in dict.fromkeys(stages.stage):
        line = [stage]
        for column in columns:
            if (*column, stage) not in counted.index:  # a single row has no first look
                line.append("")
                continue
            of = counted.loc[(*column, stage)]
            bound = bound_by(of.operations / of.bytes, of.arithmetic, peaks)
            line.append(
                f"{cells['time in all layers', *column, stage]:.3g} · {cells['of the roof', *column, stage]:.0%} of {bound}"
            )
        lines.append(line)
    header = ["ms in all layers · of the roof"]
    header += [f"{phase}, {keys} keys" + (f", batch {batch}" if phase == "decode" else "") for phase, batch, keys in columns]
    shown = ", ".join(f"{row.metric} {row.value:.0f} {row.unit}" for row in peaks.itertuples())
    first = stages.iloc[0]
    return table(
        header, lines, name, f"{first.chunk_rows} rows in a prefill, medians of {first.n} rounds, peaks of the fastest; {shown}"
    )


def roofline_intensity() -> str:
    """Operations a byte of memory of every stage, from how many on arithmetic limits it, and the batch that takes it there."""
    rows = rows_of(_WITHOUT_TILES)
    peaks, stages = rows[rows.method == "machine"].set_index("metric").value, rows[rows.metric == "of the roof"]
    longest = stages[stages.context_tokens == stages.context_tokens.max()]
    lines = []
    for stage, of in longest.groupby("stage", sort=False):
        prefill, decode = of[of.phase == "prefill"].iloc[0], of[of.phase == "decode"].set_index("batch")
        ridge = peaks[f"peak {prefill.arithmetic}"] / peaks["bandwidth"]
        intensities = [f"{decode.operations[batch] / decode.bytes[batch]:.3g}" for batch in (1, 8)] if len(decode) else ["", ""]
        crossing = _crossing(decode, ridge) if len(decode) else ""
        lines.append([stage, f"{ridge:.0f}", f"{prefill.operations / prefill.bytes:.3g}", *intensities, crossing])
    first = longest.iloc[0]
    heads = ["operations a byte", "arithmetic limits from", "prefill", "decode, batch 1", "decode, batch 8"]
    heads += ["batch from which it does"]
    n = f"{first.chunk_rows} rows in a prefill, {first.context_tokens} keys; counted, beside measured peaks"
    return table(heads, lines, _WITHOUT_TILES, n)


def _crossing(decode: pd.DataFrame, ridge: float) -> str:
    """The sequences with which a step does so many operations a byte, some bytes being read once for all; a dash: no number."""
    (one, many), batch = (decode.loc[b] for b in (1, decode.index.max())), decode.index.max()
    own = (many.bytes - one.bytes) / (batch - 1)  # of each sequence
    gain = one.operations - ridge * own
    return f"{math.ceil(ridge * (one.bytes - own) / gain)}" if gain > 0 else "–"


def prompt_by_the_roof() -> str:
    """Seconds of a whole prompt in blocks and attention, as measured in its last chunk and at that chunk's roof."""
    return _prompt_by_the_roof(_ROOFS)


def prompt_by_the_roof_avx512() -> str:
    """The same on a processor without matrix units."""
    return _prompt_by_the_roof(_WITHOUT_TILES)


def _prompt_by_the_roof(name: str) -> str:
    seconds = prefill_seconds(rows_of(name)).unstack("context_tokens")
    lengths = list(seconds.taken.columns)
    lines = [
        [stage, *(f"{seconds[column, tokens][stage]:.2f}" for tokens in lengths for column in ("taken", "least"))]
        for stage in seconds.index
    ]
    heads = [f"{words}, {tokens} tokens" for tokens in lengths for words in ("seconds", "by the roof")]
    return table(["part of a prefill", *heads], lines, name, "a whole prompt, by the rate and the roof of its last chunk")


def ttft_stateful() -> str:
    """OpenVINO's stateful graph beside transformers and the engine, in float32."""
    return _ttft("ttft_stateful")


_HANDING_ON = (
    *("converted", "dynamic", "stateful", "NPUW REG", "NPUW REP"),
    *("NPUW LLM", "NPUW LLM REP", "NPUW LLM BEST_PERF"),
    *("NPUW LLM chunked", "NPUW LLM chunked STATIC", "NPUW LLM chunked REP"),
)


def _of_most_layers() -> pd.DataFrame:
    rows = rows_of("study_ir_reuse")
    return rows[rows.layers == rows.layers.max()]


def ir_reuse() -> str:
    """Groups, graphs and calls of every way to make graphs of a decoder, and what they cost, of the most layers measured."""
    most = _of_most_layers()
    cells = most.set_index(["phase", "method", "metric"]).value.sort_index()
    plans = most.drop_duplicates(["phase", "method"]).set_index(["phase", "method"]).plan.fillna("")
    lines = []
    for form in dict.fromkeys(most.method):
        here, chunk = cells["decode", form], cells["prefill", form]
        counts = [f"{here[name]:.0f}" for name in ("graphs", "calls", "outputs")]
        cached = f"{here['cached_s']:.2f}" if here.get("cached_s", float("nan")) > 0 else ""
        costs = f"{here['compile_s']:.2f}", cached, f"{here['held_bytes'] / 1e6:.0f}"
        groups = plans["decode", form], plans["prefill", form]
        lines.append([form, *groups, *counts, *costs, *(f"{of['step_times_whole']:.2f}" for of in (here, chunk))])
    header = ["form", "groups, decoding", "groups, prefill", "graphs", "calls", "outputs of calls"]
    header += ["compile, s", "cached, s", "memory, MB"]
    header += ["decoding step, times its base", "prefill, times its base"]
    first, chunk_rows = most[most.metric == "step_s"].iloc[0], int(most[most.phase == "prefill"].chunk_rows.min())
    n = f"{first.layers} layers, {chunk_rows} rows a chunk behind {first.context_tokens} tokens, medians of {first.n} steps"
    return table(header, lines, "study_ir_reuse", f"{first.model}, {n}; graphs to memory: of decoding")


def ir_reuse_copies() -> str:
    """What copying the outputs of calls takes, steps of any length beside fixed ones, and the first step behind a prompt."""
    rows = _of_most_layers()
    cells = rows.set_index(["phase", "method", "metric"]).value.sort_index()
    lines = []
    for form in _HANDING_ON:
        here, chunk = cells["decode", form], cells["prefill", form]
        copied = (dash(scale * of.get(metric, float("nan")), 1) for of in (here, chunk) for metric, scale in _COPIED.items())
        steps = (f"{of['step_times_whole']:.2f}" for of in (here, chunk))
        first = (dash(here.get(metric, float("nan")), 2) for metric in ("first_step_s", "first_step_times_whole"))
        lines.append([form, *copied, *steps, *first])
    header = [
        "form",
        "outputs of a decoding step, MB",
        "copying them, % of the step",
        "outputs of a prefill chunk, MB",
        "copying them, % of the chunk",
    ]
    header += ["decoding step, times its base", "prefill, times its base", "first decoding step, s", "times its base's first"]
    return table(header, lines, "study_ir_reuse", _steps(rows))


def ir_reuse_folding() -> str:
    """What folding saves where NPUW cuts a decoder, and what the cuts themselves cost."""
    rows = _of_most_layers()
    cells = rows.set_index(["phase", "method", "metric"]).value.sort_index()
    lines = []
    for form in ("NPUW NONE", "NPUW REG", "NPUW REG unfolded"):
        here, chunk = cells["decode", form], cells["prefill", form]
        costs = f"{here['graphs']:.0f}", f"{here['calls']:.0f}", f"{here['compile_s']:.2f}", f"{here['held_bytes'] / 1e6:.0f}"
        steps = (text for of in (here, chunk) for text in (f"{of['step_times_whole']:.2f}", f"{1e3 * of['call_s']:.1f}"))
        lines.append([form, *costs, *steps])
    heads = ["form", "graphs", "calls", "compile, s", "memory, MB", "decoding step, times its base", "a call of it, ms"]
    heads += ["prefill, times its base", "a call of it, ms"]
    return table(heads, lines, "study_ir_reuse", f"{_steps(rows)}; graphs to memory: of decoding")


def _steps(rows: pd.DataFrame) -> str:
    """Of which decoder, behind how many tokens, and how often."""
    first = rows[rows.metric == "step_s"].iloc[0]
    return f"{first.model}, {first.layers} layers, {first.context_tokens} earlier tokens, medians of {first.n} steps"


def ir_reuse_layers() -> str:
    """Groups, calls and costs of NPUW's forms beside the graph as it is converted, of narrow decoders of many layers."""
    rows = rows_of("study_ir_reuse_layers")
    cells = rows.set_index(["layers", "phase", "method", "metric"]).value.sort_index()
    plans = rows.drop_duplicates(["layers", "phase", "method"]).set_index(["layers", "phase", "method"]).plan.fillna("")
    lines = []
    for layers in sorted(rows.layers.unique()):
        for form in dict.fromkeys(rows.method):
            here, chunk = cells[layers, "decode", form], cells[layers, "prefill", form]
            groups = plans[layers, "decode", form], plans[layers, "prefill", form]
            costs = f"{here['calls']:.0f}", f"{here['compile_s']:.2f}", f"{here['held_bytes'] / 1e6:.0f}"
            steps = (f"{of['step_times_whole']:.2f}" for of in (here, chunk))
            lines.append([f"{layers}", form, *groups, *costs, *steps])
    header = ["layers", "form", "groups, decoding", "groups, prefill", "calls", "compile, s", "memory, MB"]
    header += ["decoding step, times its base", "prefill, times its base"]
    first = rows[rows.metric == "step_s"].iloc[0]
    n = f"{first.model}, medians of {first.n} steps; calls to memory: of decoding"
    return table(header, lines, "study_ir_reuse_layers", n)


def passes() -> str:
    """The first token, the next one and memory of a graph by what passes made of it, for each vocabulary."""
    rows = rows_of("study_passes")
    cells, lines = rows.set_index(["vocabulary", "method", "metric"]).value.sort_index(), []
    for vocabulary in sorted(rows.vocabulary.unique()):
        for form in dict.fromkeys(rows.method):
            at = cells[vocabulary, form]
            times = f"{1e3 * at.first_token:.0f}", f"{1e3 * at.next_token:.1f}"
            lines.append([f"{vocabulary}", form, *times, f"{at.peak_bytes / 1e6:.0f}"])
    first = rows[rows.metric == "first_token"].iloc[0]
    header = ["vocabulary", "graph", "first token, ms", "next token, ms", "MB for the first token"]
    n = f"{first.model}, prompts of {first.context_tokens} tokens, medians of {first.n} interleaved rounds"
    return table(header, lines, "study_passes", n)
