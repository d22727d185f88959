"""Which methods differ: the comparisons in a study's rows, decided by their corrected p-values."""

import pandas as pd
from rich.table import Table

from shadowattn.evaluation.comparison import verdict

_GAIN, _P = "gain_over_", "_p"


def gains(rows: pd.DataFrame) -> pd.DataFrame:
    """A line for each comparison in a study's rows, in their order.

    Columns: method, rival, retention, n (windows), gain, low, high (nat, 95 %), p (Holm-corrected), flag and verdict.
    """
    parts = rows[rows.metric.str.startswith(_GAIN)]
    lines = parts[parts.metric.str.endswith(_P) & (parts.unit == "1")]  # a rival's own name may end like that; gains are in nat
    lines = lines.assign(rival=lines.metric.str.slice(len(_GAIN), -len(_P)), p=lines.value)
    values = parts.set_index(["method", "retention", "metric"]).value
    for column, ending in (("gain", ""), ("low", "_low"), ("high", "_high")):
        places = zip(lines.method, lines.retention, lines.rival, strict=True)
        lines[column] = [values[method, at, f"{_GAIN}{rival}{ending}"] for method, at, rival in places]
    decided = zip(lines.gain, lines.p, lines.n, strict=True)
    lines["verdict"] = [verdict(gain, p, n=n, comparisons=len(lines)) for gain, p, n in decided]
    columns = ["method", "rival", "retention", "n", "gain", "low", "high", "p", "flag", "verdict"]
    return lines[columns].reset_index(drop=True)


def comparisons(rows: pd.DataFrame) -> Table | str:
    """A line for each method and rival: at how many retentions it is better and worse, and by how much at each."""
    gain_table = gains(rows)
    if gain_table.empty:
        return ""
    windows = " or ".join(map(str, sorted(gain_table.n.unique())))
    scope = f"{len(gain_table)} comparisons, n = {windows} windows"
    if (gain_table.verdict == "too few windows").all():
        return f"{scope}: too few windows to tell any two methods apart; set evaluation.windows"
    table = Table(
        "method", "against", "better at", "worse at", "retention", "gain, nat", "95 %", "p", "verdict",
        title=f"{scope}: sign-flip test of paired losses, p Holm-corrected; better or worse where p ≤ 0.05",
        title_justify="left",
    )  # fmt: skip
    for (method, rival), line in gain_table.groupby(["method", "rival"], sort=False):
        first = [method, rival, *(f"{(line.verdict == decided).sum()} of {len(line)}" for decided in ("better", "worse"))]
        for one in line.itertuples():
            interval = f"{one.low:+.4f} … {one.high:+.4f}"
            label = f"{one.verdict} ({one.flag})" if one.flag else one.verdict
            table.add_row(*first, f"{one.retention:g}", f"{one.gain:+.4f}", interval, f"{one.p:.2g}", label)
            first = [""] * 4
    return table
