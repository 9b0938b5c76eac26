"""The lists of wrong edits fit the code, so that `make mutants` can try each."""

import re
import shutil

import pytest

from tests.mutants import ROOT, read_mutants

MUTANTS = read_mutants()


def test_edits_have_sentences_of_their_own():
    sentences = [mutant.edit for mutant in MUTANTS]
    assert len(sentences) == len(set(sentences))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.edit)
def test_each_edit_changes_one_place_and_names_tests_that_exist(mutant, tmp_path):
    (tmp_path / mutant.file).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / mutant.file, tmp_path / mutant.file)
    mutant.apply(tmp_path)
    assert (tmp_path / mutant.file).read_bytes() != (ROOT / mutant.file).read_bytes()
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not name or re.search(rf"^\s*def {re.escape(name.partition('[')[0])}\(", text, re.M)
