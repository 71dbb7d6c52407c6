"""A picture or a clip of the demo's flags that is not there."""

import pytest

from m6_multimodal_pd import demo


@pytest.mark.parametrize("flag", ["--image", "--video"])
def test_a_file_that_does_not_exist_is_one_clear_line(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--trace", "off", flag, "/nowhere/at/all.gif"]) == 2
    out, err = capsys.readouterr()
    assert "No such file" in err and len(err.splitlines()) == 1 and "Traceback" not in out + err
