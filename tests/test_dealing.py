from pathlib import Path

from tests.dealing import LONGEST, TOGETHER, unit_of, weight_of

ROOT = Path(__file__).parents[1]


def test_files_that_share_a_cluster_are_dealt_as_one() -> None:
    assert unit_of("tests/interop/test_calls.py") == unit_of("tests/interop/test_rpc.py") == "tests/interop"
    assert unit_of("tests/wire/test_task.py") == "tests/wire/test_task.py"


def test_the_longest_come_first_and_the_rest_by_number_of_tests() -> None:
    sizes = {"tests/a.py": 9, "tests/b.py": 90, LONGEST[1]: 1, LONGEST[0]: 2}
    dealt = sorted(sizes, key=lambda unit: weight_of(unit, sizes[unit]), reverse=True)
    assert dealt == [LONGEST[0], LONGEST[1], "tests/b.py", "tests/a.py"]


def test_what_is_named_is_there() -> None:
    assert [unit for unit in {*LONGEST, *TOGETHER} if not (ROOT / unit).exists()] == []
