"""The file of terms: what it holds only ever rises, and one that is damaged is said to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from dht.terms import TermFile, Terms
from meshcee.errors import UsageError


def test_saves_that_cross_keep_the_higher_of_each(tmp_path: Path) -> None:
    file = TermFile(tmp_path / "terms.json")
    file.save(Terms(9, (2, "a")))
    file.save(Terms(3, (8, "b")))
    assert file.load() == Terms(9, (8, "b"))


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"counter": "x", "accepted": [1, "a"]}', '{"counter": 1, "accepted": 3}']
)
def test_a_damaged_file_of_terms_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "terms.json").write_text(text)
    with pytest.raises(UsageError, match="file of accepted terms"):
        TermFile(tmp_path / "terms.json").load()
