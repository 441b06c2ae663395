"""-A, from what a user typed to an app. Modules have names of their own, because imports stay."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from umbel import App
from umbel.errors import AppNotFound
from umbel.launch.loading import GUESSES, find_app, load_app

ONE = "from umbel import App\nshop = App('shop')\n"
SEVERAL = "from umbel import App\nbank = App('bank')\nshop = App('shop')\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UMBEL_APP", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in GUESSES:  # they have fixed names; another test must not find these
        sys.modules.pop(name, None)


def write(path: str, text: str = ONE) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
    importlib.invalidate_caches()


def test_a_module_and_an_attribute_name_an_app() -> None:
    write("loading_a.py", SEVERAL)
    assert find_app("loading_a:shop").app.name == "shop"
    assert find_app("loading_a:bank").app.name == "bank"


def test_the_only_app_of_a_module_needs_no_name() -> None:
    write("loading_b.py", ONE + "same = shop\n")
    assert find_app("loading_b").app.name == "shop"


def test_an_app_named_app_is_taken_among_several() -> None:
    write("loading_c.py", SEVERAL + "app = App('main')\n")
    assert find_app("loading_c").app.name == "main"


def test_several_apps_are_named_in_the_refusal() -> None:
    write("loading_d.py", SEVERAL)
    with pytest.raises(AppNotFound, match=r"several apps; name one of bank, shop after a colon"):
        find_app("loading_d")


def test_a_module_without_an_app_is_refused() -> None:
    write("loading_e.py", "x = 1\n")
    with pytest.raises(AppNotFound, match="it contains no App"):
        find_app("loading_e")
    with pytest.raises(AppNotFound, match="'loading_e' has no App named 'x'"):
        find_app("loading_e:x")


def test_a_path_to_a_file_names_it_too() -> None:
    write("below/loading_f.py")
    found = find_app("below/loading_f.py:shop")
    assert found.app.name == "shop"
    assert (found.spec.target, found.spec.search_path) == ("loading_f:shop", (str(Path("below").resolve()),))


def test_an_app_is_in_the_directory_that_it_is_imported_from(tmp_path: Path) -> None:
    write("below/loading_n.py")
    write("project/loading_shop/__init__.py", "")
    write("project/loading_shop/tasks.py")
    write("loading_o.py")
    write("loading_p.py", "from umbel import App\nshop = App('shop', directory='below')\n")
    wanted = {
        "below/loading_n.py": "below/umbel.db",
        "project/loading_shop/tasks.py": "project/umbel.db",  # one above its package
        "loading_o": "umbel.db",
        "loading_p": "below/umbel.db",
    }
    found = {target: find_app(target).app.settings.broker for target in wanted}
    assert found == {target: f"sqlite:///{tmp_path / file}" for target, file in wanted.items()}
    assert App("typed").settings.broker == f"sqlite:///{tmp_path}/umbel.db"


def test_a_module_inside_a_package_is_found() -> None:
    write("loading_package/tasks.py")
    assert find_app("loading_package.tasks").app.name == "shop"


@pytest.mark.parametrize("target", ["no_such_module", "no_such_package.tasks"])
def test_a_module_that_is_not_here_is_said_to_be_missing(target: str) -> None:
    with pytest.raises(AppNotFound, match=f"-A {target}: there is no module {target!r} here"):
        find_app(target)


def test_a_file_that_is_not_here_is_said_to_be_missing() -> None:
    with pytest.raises(AppNotFound, match=r"there is no file .*nothing\.py"):
        find_app("nothing.py")


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("loading_g", "1/0\n", "ZeroDivisionError"),
        ("loading_h", "def broken(\n", r"SyntaxError: .* \(loading_h.py, line 1\)$"),
        ("loading_i", "import no_such_library\n", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("loading_j", "raise SystemExit(3)\n", "SystemExit"),
        (
            "loading_k",
            "from umbel import App\nApp(brocker='x')\n",
            r"did you mean 'broker'\? \(.*loading_k.py, line 2\)$",
        ),
    ],
)
def test_a_module_that_cannot_be_imported_says_why(name: str, text: str, problem: str) -> None:
    write(f"{name}.py", text)
    with pytest.raises(AppNotFound, match=f"importing '{name}' failed: .*{problem}"):
        find_app(name)


def test_left_out_it_is_the_variable_then_tasks_then_app(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AppNotFound, match=r"neither \./tasks\.py nor \./app\.py exists"):
        find_app(None)
    write("app.py", "from umbel import App\napp = App('from app.py')\n")
    assert find_app(None).app.name == "from app.py"
    write("tasks.py", "from umbel import App\napp = App('from tasks.py')\n")
    assert find_app(None).app.name == "from tasks.py"
    write("loading_l.py", "from umbel import App\napp = App('from the variable')\n")
    monkeypatch.setenv("UMBEL_APP", "loading_l")
    assert find_app(None).app.name == "from the variable"


def test_children_load_the_same_app_by_what_they_are_handed() -> None:
    write("loading_m.py", SEVERAL)
    found = find_app("loading_m:bank")
    assert found.spec.loader == "umbel.launch.loading:load_app"
    loaded = load_app(found.spec.target, *found.spec.search_path)
    assert isinstance(loaded, App)
    assert loaded is found.app


def test_what_every_child_loads_leaves_out_what_few_tasks_need() -> None:
    """A child is as large as what it has imported: an event loop and TLS are a quarter of it."""
    costly = [
        "asyncio",
        "ssl",
        "hashlib",
        "pickle",
        "difflib",
        "lzma",
        "umbel.protocol.leadership.coordination",
    ]
    program = (
        "import sys, umbel.pools.prefork.forkserver, umbel.launch.loading\n"
        "app = umbel.App('a', broker='amqp://localhost//')\n"
        "@app.task\ndef plain(): ...\n"
        f"print([name for name in {costly} if name in sys.modules])\n"
        "@app.task\nasync def waits(): ...\n"
        "print('asyncio' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "True"]
