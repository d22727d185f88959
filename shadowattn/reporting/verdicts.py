"""Which methods differ: the comparisons in a study's rows, decided by their corrected p-values."""

import pandas as pd
from rich.table import Table

from shadowattn.evaluation.comparison import verdict

# What methods are compared by, and how the metrics of such comparisons begin; a rival's name follows.
PREFIXES = {"loss": "gain_over_", "divergence": "closer_than_"}
_P = "_p"
_PAIRED = {"loss": "paired losses", "divergence": "paired divergences from dense attention"}
_REMEDY = {"loss": "evaluation.windows", "divergence": "evaluation.divergence_windows"}


def gains(rows: pd.DataFrame, by: str = "loss") -> pd.DataFrame:
    """A line for each comparison in a study's rows, in their order, by loss or by divergence.

    Columns: method, rival, retention, n (windows), gain, low, high (nat, 95 %), p (Holm-corrected), flag and verdict.
    """
    prefix = PREFIXES[by]
    parts = rows[rows.metric.str.startswith(prefix)]
    lines = parts[parts.metric.str.endswith(_P) & (parts.unit == "1")]  # a rival's own name may end like that; gains are in nat
    lines = lines.assign(rival=lines.metric.str.slice(len(prefix), -len(_P)), p=lines.value)
    values = parts.set_index(["method", "retention", "metric"]).value
    for column, ending in (("gain", ""), ("low", "_low"), ("high", "_high")):
        places = zip(lines.method, lines.retention, lines.rival, strict=True)
        lines[column] = [values[method, at, f"{prefix}{rival}{ending}"] for method, at, rival in places]
    decided = zip(lines.gain, lines.p, lines.n, strict=True)
    lines["verdict"] = [verdict(gain, p, n=n, comparisons=len(lines)) for gain, p, n in decided]
    columns = ["method", "rival", "retention", "n", "gain", "low", "high", "p", "flag", "verdict"]
    return lines[columns].reset_index(drop=True)


def compared(rows: pd.DataFrame) -> list[Table | str]:
    """What a study's rows say of which methods differ: by loss, and where a run asked for that, by divergence."""
    tables = [comparisons(rows, by) for by in PREFIXES]
    return [table for table in tables if table]


def comparisons(rows: pd.DataFrame, by: str = "loss") -> Table | str:
    """A line for each method and rival: at how many retentions it is better and worse, and by how much at each."""
    gain_table = gains(rows, by)
    if gain_table.empty:
        return ""
    windows = " or ".join(map(str, sorted(gain_table.n.unique())))
    scope = f"{len(gain_table)} comparisons, n = {windows} windows"
    if (gain_table.verdict == "too few windows").all():
        return f"{scope}: too few windows to tell any two methods apart; set {_REMEDY[by]}"
    table = Table(
        "method", "against", "better at", "worse at", "retention", "gain, nat", "95 %", "p", "verdict",
        title=f"{scope}: sign-flip test of {_PAIRED[by]}, p Holm-corrected over these; better or worse where p ≤ 0.05",
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
