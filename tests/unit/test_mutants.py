"""The list of faults that the tests must notice (tests/mutants.json) follows the package."""

from tests import mutants


def test_every_mutant_is_found_and_has_its_tests() -> None:
    listed = mutants.listed()
    lines = mutants.find_lines(listed)
    for mutant in listed:
        assert mutants.text_with(mutant, lines[mutant.id]) != lines[mutant.id].path.read_text()
        missing = [test for test in mutant.tests if not (mutants.ROOT / test).is_file()]
        assert not missing, f"{mutant.id}: no file {missing}"
