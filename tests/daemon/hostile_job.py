"""A job that does what no job should, named by its arguments, and says "done" when it has."""

import os
import shutil
import socket
import sys
import time

from ganger.injob.page import Page
from ganger.injob.page_layout import Word

job_dir = os.path.realpath(os.environ["GANGER_JOB_DIR"])
run_dir = os.path.dirname(os.path.realpath(os.environ["GANGER_PAGE"]))
log = os.readlink("/proc/self/fd/1")


def replace(path, make):
    if os.path.lexists(path):
        os.unlink(path)
    make(path)


def puts_pipes_in_place_of_files():
    for name in ("gang", "wanted", "local", "outcome", "rank-0.exit", "rank-0.error"):
        replace(os.path.join(job_dir, f"{name}.json"), os.mkfifo)
    replace(log, os.mkfifo)
    shutil.rmtree(os.path.join(job_dir, "orders"))
    open(os.path.join(job_dir, "orders"), "w").close()


def puts_files_in_place_of_directories():
    for path in (job_dir, run_dir):
        shutil.rmtree(path)
        open(path, "w").close()


def puts_directories_in_place_of_files():
    for name in ("outcome", "rank-0.exit", "local"):
        path = os.path.join(job_dir, f"{name}.json")
        if os.path.isfile(path):
            os.unlink(path)
        os.makedirs(os.path.join(path, *["deeper"] * 40))
    with open(os.path.join(os.path.dirname(log), "rank-0.json"), "w") as file:
        file.write('{"segments": {"1": {"length": []}, "x": 3}}')


def asks_for_a_checkpoint_that_cannot_be():
    Page.open(os.environ["GANGER_PAGE"]).set(Word.CHECKPOINT_SEQ, (1 << 64) - 1)


def sends_nonsense():
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(os.environ["GANGER_SOCKET"])
        for packet in (b"[" * 60_000, b"\xff\xfe", b'{"event": ["x"], "message": {"a": 1}}', b"null"):
            connection.send(packet)


def leaves_processes_behind():
    for exec_too in (True, False):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                print("left behind", os.getpid(), flush=True)
                os.closerange(0, 3)
                if exec_too:
                    os.execvp("sleep", ["sleep", "600"])
                time.sleep(600)
            os._exit(0)


def closes_its_files():
    os.closerange(3, 1024)


for deed in sys.argv[1:]:
    globals()[deed]()
os.write(1, b"done\n")
time.sleep(0.3 if "leaves_processes_behind" in sys.argv else 600)
