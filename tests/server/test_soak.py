"""Sixteen clients at once, for some seconds."""

from tests.server.process import serving, write_model
from tests.server.soak import FLAGS, soak


def test_answers_stay_right_under_disconnects_budget_changes_and_moves(tmp_path):
    model = write_model(tmp_path)
    with serving(tmp_path, *FLAGS) as served:
        soak(served, model.name, seconds=10)
        assert served.terminate() == 0
