from rich.console import Group
from rich.table import Table

from experiments.progress import show, work_bar
from shadowattn.offline.work import AblationWork


def test_work_comes_through_in_order_and_a_pipe_sees_nothing(capsys):
    work = [AblationWork(0, (0, 1), 3.0), AblationWork(1, (), 1.0)]
    assert list(work_bar(work, "ablate")) == work
    assert capsys.readouterr() == ("", "")


def test_no_name_in_a_table_is_cut_short(capsys):
    """In a file of 160 columns, where the other columns do not fit."""
    table = Table("method", *(f"a metric with a long name, {index}" for index in range(12)))
    table.add_row("somebody.OwnEstimator", *["1234567890123456789"] * 12)
    show(Group("above", table))
    shown = capsys.readouterr().out
    assert "somebody.OwnEstimator" in shown
    assert "…" not in shown
