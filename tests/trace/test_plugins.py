"""A recording may come from anywhere: a replay loads no code that only the file names."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import pytest

from quire.cli.main import make_parser
from quire.errors import InvalidParams, QuireError
from quire.trace.format import encode
from tests.tools.recordings import arrival, engine, header

pytestmark = pytest.mark.core


def replay(folder: Path, speculate: object, *options: str) -> None:
    lines = (header(), engine(config={"model": str(folder), "speculate": speculate}), arrival())
    (folder / "a").write_bytes(gzip.compress(b"".join(map(encode, lines))))
    words = ["trace", "replay", str(folder / "a"), *options]
    arguments = make_parser(words).parse_args(words)
    arguments.run(arguments)


@pytest.mark.parametrize("speculate", ["evil:Proposer", "auto,evil:Proposer", "suffix,evil:Proposer"])
def test_code_that_a_recording_names_is_not_loaded(
    speculate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('loaded')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidParams, match=r"does not load what a file names: evil:Proposer\."):
        replay(tmp_path, speculate)
    assert "evil" not in sys.modules


@pytest.mark.parametrize("speculate", [7, None, "", ["x"]])
def test_a_recorded_option_of_another_type_is_refused(speculate: object, tmp_path: Path) -> None:
    with pytest.raises(InvalidParams, match="speculate"):
        replay(tmp_path, speculate)


@pytest.mark.parametrize("given", ["off", "evil:Proposer"])
def test_what_is_given_is_used(given: str, tmp_path: Path) -> None:
    with pytest.raises(QuireError) as found:  # the folder holds no model
        replay(tmp_path, "evil:Proposer", "--speculate", given)
    assert "does not load" not in str(found.value)
