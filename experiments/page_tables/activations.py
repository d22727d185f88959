"""Time of attention on a model's own queries, keys and values."""

from experiments.page_tables.attention_common import ACTIVATIONS_AMX, said_least
from experiments.page_tables.common import one, rows_of, table
from experiments.studies import attention_candidates as candidates
from shadowattn.reporting.figures.attention_stages import STAGE


def activation_speed_smollm2_avx512() -> str:
    """The whole path on SmolLM2's own queries, keys and values."""
    return _activation_speed("study_activation_speed_smollm2_avx512")


def activation_speed_amx() -> str:
    """The whole path on SmolLM2's own queries, keys and values where tiles multiply bfloat16."""
    return _activation_speed(ACTIVATIONS_AMX)


def activation_speed_avx2_vnni() -> str:
    """The whole path on SmolLM2's own queries, keys and values, by the kernels of level `avx2_vnni`."""
    return _activation_speed("activations_avx2_vnni")


_SHOWN_BLOCK = 32


def _activation_speed(name: str) -> str:
    """Times faster than dense attention by length, and break-even."""
    rows = rows_of(name)
    lengths = sorted(rows.context_tokens.unique())
    ratios = rows[rows.metric == "times_faster_than_own_dense"]
    layers = rows[(rows.metric == "layer_times_faster_than_own_dense") & (rows.context_tokens == lengths[-1])]
    lines = []
    ratios = ratios[ratios.query_block.isin([1, _SHOWN_BLOCK])]  # loss against time shows the others
    for (dtype, block, at, method), cell in ratios.groupby(["dtype", "query_block", "retention", "method"], sort=False):
        of = {"dtype": dtype, "method": method, "retention": at}
        values = [f"{one(cell, context_tokens=keys):.2f}" for keys in lengths]
        if method == "sdpa":
            lines.append([dtype, "SDPA", "", *values, "", ""])
            continue
        even = said_least(one(rows, metric="break_even_keys", **of), lengths)
        by_layer = layers[(layers.dtype == dtype) & (layers.method == method) & (layers.retention == at)].value
        spread = f"{by_layer.min():.2f} to {by_layer.max():.2f}"
        rows_of_list = {"per_row": "each row", "hierarchical": "each row, after a first look"}.get(method, f"{block} rows")
        lines.append([dtype, rows_of_list, f"{at:.0%}", *values, even, spread])
    header = ["", "a list for", "of the keys", *(f"{keys} keys" for keys in lengths), "break-even, keys"]
    header.append(f"layers at {lengths[-1]} keys")
    n = f"times faster than our dense attention, medians of {int(rows[rows.metric == 'time'].n.iloc[0])} rounds"
    return table(header, lines, name, n)


def activation_stages() -> str:
    """What lists for every row spend their time on, on SmolLM2's activations, and what each part alone would gain."""
    return _activation_stages("study_activation_speed_smollm2_avx512", 8192)


def _activation_stages(name: str, keys: int) -> str:
    rows = rows_of(name)
    times = rows[(rows.metric == "time") & (rows.context_tokens == keys)]
    lines = []
    for dtype, some in times.groupby("dtype", sort=False):
        dense, quantise, estimate = (one(some, method=method) for method in ("own_dense", "quantise", "estimate"))
        for at, cell in some[some.retention < 1].groupby("retention"):
            of = cell.set_index("method").value
            before = quantise + of["choose"]
            attend = of["per_row"] - before
            parts = (quantise, estimate, of["choose"] - estimate, attend, of["per_row"], of["hierarchical"])
            bounds = (dense / before, dense / attend, at * dense / attend)
            shown = (*(f"{time:.0f}" for time in (dense, *parts)), *(f"{bound:.2f}" for bound in bounds))
            lines.append([f"{dtype}, {at:.0%} of the keys", *shown])
    header = ["milliseconds, all layers", "our dense attention", "quantise", "estimate", "select", "attend (the rest)"]
    header += ["`int8_fused`", "`hierarchical`", "dense / (quantise + estimate + select)", "dense / attend"]
    header.append("speed of attend, of dense attention's")
    n = f"{keys} keys, medians of {int(times.n.iloc[0])} rounds; speed: multiplications a second"
    return table(header, lines, name, n)


_CLOCKED = {"per_row": "each row", "hierarchical": "each row, after a first look", "shared_32": "32 rows"}


def clocked_stages() -> str:
    """Where the time of whole paths goes on SmolLM2's activations, by clocks in the kernels."""
    return _clocked_stages("activation_stages_smollm2")


def clocked_stages_amx() -> str:
    """The same where tiles multiply bfloat16."""
    return _clocked_stages(ACTIVATIONS_AMX)


def _clocked_stages(name: str) -> str:
    rows = rows_of(name)
    keys = rows.context_tokens.max()
    rows = rows[rows.context_tokens == keys]
    stages = [STAGE + stage for stage in candidates.STAGES]
    timed = rows[rows.metric.isin(stages)].set_index(["dtype", "method", "retention", "metric"]).value.to_dict()
    lines, quotients = [], []
    for dtype in rows.dtype.unique():
        for method, label in _CLOCKED.items():
            for at in sorted(rows[rows.method == method].retention.unique()):
                of = [timed.get((dtype, method, at, stage), 0.0) for stage in stages]
                lines.append([dtype, label, f"{at:.0%}", *(f"{time:.0f}" if time else "" for time in of), f"{sum(of):.0f}"])
                quotients.append(sum(of) / one(rows, dtype=dtype, method=method, retention=at, metric="time"))
        dense = one(rows, dtype=dtype, method="own_dense", metric="time")
        lines.append([dtype, "our dense attention", "", *[""] * len(stages), f"{dense:.0f}"])
    header = ["milliseconds, all layers", "a list for", "of the keys", *candidates.STAGES, "all"]
    n = f"{keys} keys, medians of {int(rows[rows.metric == 'time'].n.iloc[0])} rounds of each stage, whose sums are "
    n += f"{min(quotients):.2f} to {max(quotients):.2f} of the times without clocks"
    return table(header, lines, name, n)
