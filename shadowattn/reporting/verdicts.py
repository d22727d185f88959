"""Which methods differ: the comparisons in a study's rows, decided by their corrected p-values."""

import pandas as pd
from rich.table import Table

from shadowattn.evaluation.comparison import verdict

_GAIN, _P = "gain_over_", "_p"


def gains(rows: pd.DataFrame) -> pd.DataFrame:
    """A line for each comparison in a study's rows, in their order.

    Columns: method, rival, retention, n (windows), gain, low, high (nat, 95 %), p (Holm-corrected), flag and verdict.
    """
    found = rows[rows.metric.str.startswith(_GAIN)]
    made = found[found.metric.str.endswith(_P) & (found.unit == "1")]  # a rival's own name may end like that; gains are in nat
    made = made.assign(rival=made.metric.str.slice(len(_GAIN), -len(_P)), p=made.value)
    values = found.set_index(["method", "retention", "metric"]).value
    for column, ending in (("gain", ""), ("low", "_low"), ("high", "_high")):
        places = zip(made.method, made.retention, made.rival, strict=True)
        made[column] = [values[method, at, f"{_GAIN}{rival}{ending}"] for method, at, rival in places]
    decided = zip(made.gain, made.p, made.n, strict=True)
    made["verdict"] = [verdict(gain, p, n=n, comparisons=len(made)) for gain, p, n in decided]
    columns = ["method", "rival", "retention", "n", "gain", "low", "high", "p", "flag", "verdict"]
    return made[columns].reset_index(drop=True)


def comparisons(rows: pd.DataFrame) -> Table | str:
    """A line for each method and rival: at how many retentions it is better and worse, and by how much at each."""
    found = gains(rows)
    if found.empty:
        return ""
    windows = " or ".join(map(str, sorted(found.n.unique())))
    asked = f"{len(found)} comparisons, n = {windows} windows"
    if (found.verdict == "too few windows").all():
        return f"{asked}: too few windows to tell any two methods apart; set evaluation.windows"
    made = Table(
        "method", "against", "better at", "worse at", "retention", "gain, nat", "95 %", "p", "verdict",
        title=f"{asked}: sign-flip test of paired losses, p Holm-corrected; better or worse where p ≤ 0.05",
        title_justify="left",
    )  # fmt: skip
    for (method, rival), line in found.groupby(["method", "rival"], sort=False):
        first = [method, rival, *(f"{(line.verdict == decided).sum()} of {len(line)}" for decided in ("better", "worse"))]
        for one in line.itertuples():
            interval = f"{one.low:+.4f} … {one.high:+.4f}"
            said = f"{one.verdict} ({one.flag})" if one.flag else one.verdict
            made.add_row(*first, f"{one.retention:g}", f"{one.gain:+.4f}", interval, f"{one.p:.2g}", said)
            first = [""] * 4
    return made
