"""A script that changes things outside of its process is not offered a second run that would change them again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ganger.injob.page_layout import Capability, Word
from ganger.training.replay import ATTRIBUTE
from training.harness import Rank, offered_no_checkpoint, run_in_parts, run_to_end, write_script

pytestmark = pytest.mark.torch

HEAD = """
import glob, os, pathlib, shutil, socket, sqlite3, subprocess, sys, tempfile
import numpy, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
torch.manual_seed(1)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(12, 4))
os.chdir(sys.argv[1])
"""
PASS = """
for (x,) in DataLoader(data, batch_size=4, shuffle=True, num_workers={workers}):
    optimizer.zero_grad(); model(x).square().mean().backward(); optimizer.step()
    {inside}
"""

# A line before the training, a line in it, and what is said of it.
REPEATED = {
    "renames": ("", "torch.save(1, 'a'); os.replace('a', 'b')", "it renamed a to b at train.py:15"),
    "removes": ("open('a', 'w').close(); os.remove('a')", "", "it removed a at train.py:12"),
    "removes a tree": ("os.makedirs('a', exist_ok=True); shutil.rmtree('a')", "", "it removed a at"),
    "makes a directory": ("os.mkdir('a')", "", "it made a at train.py:12"),
    "makes one that must be new": ("pathlib.Path('a').mkdir()", "", "it made a at"),
    "links": ("", "os.path.exists('l') or os.symlink('.', 'l')", "it linked l at"),
    "copies": ("open('a', 'w').close()", "shutil.copyfile('a', 'b')", "it wrote b at"),
    "touches": ("pathlib.Path('a').touch()", "", "a at train.py:12"),
    "cuts off": ("open('a', 'w').close(); os.truncate('a', 0)", "", "it cut off a at"),
    "changes modes": ("open('a', 'w').close(); os.chmod('a', 0o600)", "", "it changed the attributes of a at"),
    "writes by descriptor": ("", "os.close(os.open('a', os.O_WRONLY | os.O_CREAT | os.O_APPEND))", "it wrote a at"),
    "updates in place": ("open('a', 'w').close()", "open('a', 'r+').close()", "it wrote a at"),
    "lets a library write": ("", "numpy.savez('a.npz', x=1)", "numpy wrote a.npz at train.py:15"),
    "starts a command": ("", "subprocess.run(['true'])", "it started true at train.py:15"),
    "starts a shell": ("os.system('true')", "", "it started true at train.py:12"),
    "forks": ("os.fork() or os._exit(0)", "", "it started a process at train.py:12"),
    "opens a database": ("sqlite3.connect('a.db')", "", "it opened the database a.db at"),
    "listens": ("socket.socket().bind(('127.0.0.1', 0))", "", "it listened at 127.0.0.1:0 at"),
    "connects": ("socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('127.0.0.1', 9))", "", "it connected to"),
    "keeps temporary files": ("room = tempfile.mkdtemp()", "", "it keeps temporary files"),
    "looks for what it saves": ("os.path.exists('a')", "torch.save(1, 'a')", "before it made it"),
    "tries to open what it saves": (
        "try: open('a')\nexcept OSError: pass",
        "open('a', 'w').close()",
        "before it made it",
    ),
    "looks for a directory in which it makes others": (
        "os.makedirs('a', exist_ok=True); os.path.exists('a/b')",
        "torch.save(1, 'a/b')",
        "before it made it",
    ),
    "lists where it makes a directory": ("os.listdir(); os.makedirs('a', exist_ok=True)", "", "before it made a there"),
    "lists where it saves": ("glob.glob('*.pt')", "torch.save(1, 'a.pt')", "before it made a.pt there"),
    "reads what it writes": (
        "open('a', 'w').close()\nopen('a').close()",
        "open('a', 'a').close()",
        "before it wrote it",
    ),
}
REPEATABLE = {
    "makes directories that may be there": ("os.makedirs('a/b', exist_ok=True)", ""),
    "makes a path that may be there": ("pathlib.Path('a/b').mkdir(parents=True, exist_ok=True)", ""),
    "looks for a directory that it makes": (
        "pathlib.Path('a').is_dir() or glob.glob('a/*') or os.path.exists('a/b')\nos.makedirs('a', exist_ok=True)",
        "torch.save(1, 'a/b')",
    ),
    "writes and saves": ("log = open('log', 'w')", "log.write('x'); torch.save(1, 'a')"),
    "loads what it saved": ("torch.save(1, 'a'); torch.load('a')", ""),
    "removes its temporary files": ("", "tempfile.NamedTemporaryFile().close()"),
    "keeps a database in memory": ("sqlite3.connect(':memory:')", ""),
    "looks for what is never there": ("os.path.exists('config.json'); os.listdir('.')", ""),
    "loads data in workers": ("WORKERS = 2", ""),
}


def _started(tmp_path: Path, before: str, inside: str) -> Rank:
    room = tmp_path / "room"
    room.mkdir()
    workers = 2 if "WORKERS" in before else 0
    script = write_script(tmp_path, HEAD + before + PASS.format(inside=inside, workers=workers))
    return Rank(tmp_path / "run", script, [room], agent=True, environment={"GANGER_JOB_ID": "7"})


@pytest.mark.parametrize("kind", REPEATED)
def test_what_a_second_run_would_do_again_is_a_reason_and_the_reason_names_it(tmp_path: Path, kind: str) -> None:
    before, inside, reason = REPEATED[kind]
    assert reason in offered_no_checkpoint(_started(tmp_path, before, inside))


@pytest.mark.parametrize("kind", REPEATABLE)
def test_what_a_second_run_can_do_again_or_leave_out_is_no_reason(tmp_path: Path, kind: str) -> None:
    rank = _started(tmp_path, *REPEATABLE[kind])
    assert rank.end() == 0, rank.output()
    assert rank.page.get(Word.CAPABILITIES) & Capability.CHECKPOINT, rank.output()


LOOKS = """
found = os.listdir('out') if os.path.isdir('out') else None
print('found', found, os.path.exists('out/last.pt'), flush=True)
if found is not None and 'last.pt' not in found:
    raise ValueError('out is there, and has no last.pt')
try:
    open('out/settings.json')
except FileNotFoundError:
    os.makedirs('out/deep', exist_ok=True)
assert os.path.isdir('out') and os.path.isdir('out/deep')
"""


def _looking(directory: Path) -> Path:
    directory.mkdir()
    return write_script(directory, HEAD + LOOKS + PASS.format(inside="torch.save(1, f'out/x.pt')", workers=0))


def _looked(rank_log: Path) -> list[str]:
    return [line for line in rank_log.read_text().splitlines() if line.startswith("found")]


def test_a_second_run_does_not_find_the_directory_that_the_first_has_made(tmp_path: Path) -> None:
    room, job = tmp_path / "room", {"GANGER_JOB_ID": "7"}
    script = _looking(room)

    run_in_parts(tmp_path, script, [room], [1, 2], agent=True, environment=job)

    assert [_looked(tmp_path / f"part-{part}/rank-0.log") for part in range(3)] == [["found None False"], [], []]
    logs = [tmp_path / f"part-{part}/rank-0.replay.log" for part in (1, 2)]
    assert [_looked(log) for log in logs] == [["found None False"]] * 2
    assert (room / "out/x.pt").exists()


def test_a_start_from_nothing_finds_what_an_earlier_attempt_has_made_and_so_does_its_second_run(tmp_path: Path) -> None:
    room = tmp_path / "room"
    script = _looking(room)
    first = {"agent": True, "environment": {"GANGER_JOB_ID": "7", "GANGER_ATTEMPT": "1"}}
    run_to_end(tmp_path / "first", script, [room], **first)
    (room / "out/last.pt").touch()

    environment = {"GANGER_JOB_ID": "7", "GANGER_ATTEMPT": "2"}
    rank = Rank(tmp_path / "second", script, [room], agent=True, environment=environment)
    assert rank.end() == 0, rank.output()

    (found,) = _looked(rank.log)
    assert "last.pt" in found
    assert found.endswith("True")
    with pytest.raises(OSError, match="No data"):
        os.getxattr(room / "out", ATTRIBUTE)
