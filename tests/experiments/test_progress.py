from experiments.progress import work_bar
from shadowattn.offline.work import AblationWork


def test_work_comes_through_in_order_and_a_pipe_sees_nothing(capsys):
    work = [AblationWork(0, (0, 1), 3.0), AblationWork(1, (), 1.0)]
    assert list(work_bar(work, "ablate")) == work
    assert capsys.readouterr() == ("", "")
