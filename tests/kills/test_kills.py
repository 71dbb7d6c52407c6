"""The programs that kill engines: the stored table, their helps, and kills that find nothing."""

import json

import pytest

from benchmarks import RESULTS
from tests.kills import matrix, soak


def test_the_table_of_kills_is_that_of_the_stored_numbers(tmp_path):
    assert matrix.main(["--redraw", "--output", str(tmp_path)]) == 0
    assert (tmp_path / "kill_matrix.md").read_text("utf-8") == (RESULTS / "kill_matrix.md").read_text("utf-8")


@pytest.mark.parametrize("program", [matrix, soak])
def test_both_programs_have_a_help(program, capsys):
    with pytest.raises(SystemExit, match="0"):
        program.main(["--help"])
    assert f"python -m {program.__name__}" in capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.parametrize("cell", ["prefill, transferring", "decode, decoding"])
def test_after_a_kill_every_request_is_answered_and_nothing_is_left(cell, tmp_path):
    assert matrix.main(["--quick", "--only", cell, "--output", str(tmp_path)]) == 0
    parts = json.loads((tmp_path / "quick" / "kill_matrix.json").read_text("utf-8"))["parts"]
    assert parts[cell]["row"]["kills"] == 1 and parts[cell]["row"]["same"] == 6
