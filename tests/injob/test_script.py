"""A script run in a forked interpreter cannot tell the difference from one Python was started with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CLIENT = str(Path(__file__).parents[2] / "client")

# What a child of the launcher does, without the launcher: the same functions in a fork of a fresh interpreter.
_FORKED = """
import os, sys
sys.path[0:1] = []
from ganger.injob.launcher.child_process import run_as_main
from ganger.injob.launcher.process_record import python_command
argv = sys.argv[1:]
pid = os.fork()
if pid:
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        import signal
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))
command = python_command(argv, os.environ, os.getcwd())
assert command is not None, argv
run_as_main(command, argv)
"""


def _compare(directory: Path, *arguments: str, same_text: bool = True) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": CLIENT, "PYTHONDONTWRITEBYTECODE": "1"}

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=60)

    expected = run([sys.executable, *arguments])
    found = run([sys.executable, "-c", _FORKED, sys.executable, *arguments])
    assert found.returncode == expected.returncode, found.stderr
    assert found.stdout == expected.stdout
    if same_text:
        assert _neutral(found.stderr) == _neutral(expected.stderr)
    return found


def _neutral(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", text)


IDENTITY = """
import sys, os, __main__
print(sys.argv, sys.path[0], __name__, __file__, __spec__, __package__, __doc__)
print(sorted(key for key in globals() if not key.startswith("_")), __main__.__dict__ is globals())
print(type(__loader__).__name__, sys.modules["__main__"].__file__, getattr(sys, "orig_argv", [])[1:])
"""


def test_argv_path_and_main_are_as_usual(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "train.py").write_text(IDENTITY)
    _compare(tmp_path, "deep/train.py", "--lr", "1e-3", "-m")
    _compare(tmp_path, str(tmp_path / "deep" / "train.py"))
    (tmp_path / "link.py").symlink_to("deep/train.py")
    _compare(tmp_path, "link.py")


def test_module_is_run_as_usual(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(IDENTITY.replace("__spec__", "__spec__.name"))
    (package / "__main__.py").write_text("from . import train\nprint(__package__)\nraise KeyError('x')")
    _compare(tmp_path, "-m", "package.train", "a", "b")
    assert "KeyError" in _compare(tmp_path, "-m", "package").stderr
    assert "No module named nothing_here" in _compare(tmp_path, "-m", "nothing_here").stderr


@pytest.mark.parametrize(
    "body",
    [
        "import sys; sys.exit()",
        "import sys; sys.exit(3)",
        "import sys; sys.exit(-1)",
        "import sys; sys.exit(True)",
        "import sys; sys.exit('a word')",
        "raise SystemExit(4)",
        "raise SystemExit((1, 2))",
        "import os; os._exit(5)",
        "def f():\n    g()\n\n\ndef g():\n    raise ValueError('deep')\n\n\nf()",
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise RuntimeError('second') from e",
        "raise KeyboardInterrupt",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "def f(:\n",
        "import sys; sys.excepthook = lambda *a: print('mine', a[0].__name__); 1 / 0",
        "import atexit; atexit.register(print, 'later'); print('now'); 1 / 0",
        "import threading; threading.Thread(target=lambda: print('thread')).start()",
        "print('no newline', end='')",
        "import sys; print(sys.flags.interactive, sys.stdin.isatty())",
        "import pickle, sys\nclass A: pass\nprint(pickle.loads(pickle.dumps(A())).__class__.__module__)",
        "import inspect\ndef f(): pass\nprint(inspect.getsource(f))",
        "# -*- coding: latin-1 -*-\nprint(len('\u00e9'))",
    ],
)
def test_ends_and_texts_are_as_usual(tmp_path: Path, body: str) -> None:
    (tmp_path / "train.py").write_text(body)
    _compare(tmp_path, "train.py")


def test_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert _compare(tmp_path, "none.py").returncode == 2


def test_directories_and_archives_run_their_main(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("import helper, sys; print(helper.NAME, sys.argv)")
    (tmp_path / "app" / "helper.py").write_text("NAME = 'helper'")
    _compare(tmp_path, "app", "x")


def test_spawned_processes_find_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import multiprocessing as m\n"
        "def work(x): return x + 1\n"
        "if __name__ == '__main__':\n"
        "    with m.get_context('spawn').Pool(1) as pool: print(pool.map(work, [1, 2]))\n"
    )
    _compare(tmp_path, "train.py")
