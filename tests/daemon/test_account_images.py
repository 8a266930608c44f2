"""Process images of jobs that run as accounts: they are saved, restored and moved as any other, run as their accounts
all the time, and gain nothing by it."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest
from daemon.account_kit import Accounted, run
from daemon.image_kit import (
    CHECKPOINT,
    OPAQUE,
    begun,
    counts,
    ended,
    expected,
    from_image,
    goes_on,
    handed_over,
    moved_in,
    moves_while_a_daemon_dies,
    needs_images,
    one_after_the_other,
    opaque,
    restores_while_its_launcher_dies,
    saved,
    saves_while_its_daemon_dies,
    saves_while_its_launcher_dies,
    until,
    until_nothing_is_left,
)
from daemon.kit import Cluster, Intents, Observed, in_phase, log_of, with_changes
from ganger.agent.v1 import agent_pb2
from ganger.v1 import job_pb2
from ganger_daemon.images.contract import ImageFacts, Machine
from ganger_daemon.node.accounts import Account
from kit.accounts import makes_accounts

pytestmark = [pytest.mark.system, makes_accounts, needs_images]


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def runs_as_ann(these: Accounted, node: str, epoch: int) -> int:
    """Check the rank's process, and return its pid."""
    pid = these.made.master.book(node).observed[epoch].ranks[0].pid
    status = status_of(pid)
    assert status["Uid"].split() == [str(these.ann.uid)] * 4
    assert status["Gid"].split() == [str(these.ann.gid)] * 4
    assert status["Groups"].split() == [str(group) for group in these.ann.groups]
    assert status["NoNewPrivs"] == "1"
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}
    return pid


def sees_its_own_alone(pid: int) -> None:
    """Check that the mounts of a process show it no shared memory and no processes of others."""
    marker = Path("/dev/shm") / f"marker-{uuid.uuid4()}"
    marker.touch()
    try:
        assert marker.name not in os.listdir(f"/proc/{pid}/root/dev/shm")
    finally:
        marker.unlink()
    mounts = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    assert "hidepid=invisible" in next(words for words in reversed(mounts) if words[4] == "/proc")[-1]


async def restored(made: Cluster, gang: Any, parked: agent_pb2.ObservedGang, node: str, epoch: int) -> Any:
    gang = from_image(made, gang, parked, node, epoch)
    await made.master.want(node, gang)
    await made.master.until(node, epoch, in_phase(Observed.PHASE_RUNNING))
    return gang


@pytest.mark.parametrize("kind", ["agent", "opaque"])
def test_a_job_of_an_account_is_saved_restored_and_moved_and_runs_as_the_account_all_the_time(kind: str) -> None:
    async def story(these: Accounted) -> None:
        made, uid = these.made, str(uuid.uuid4())
        await these.daemon("n1")
        await these.daemon("n2")
        gang = await begun(made, kind, uid)
        runs_as_ann(these, "n1", 1)
        parked = await saved(made, "n1", gang)
        image = made.storage / uid / parked.checkpoint.path
        assert (image.parent.stat().st_uid, image.parent.stat().st_mode & 0o777) == (0, 0o700)
        parts = [counts(made, "n1", uid, 1)]
        await made.master.forget("n1", 1)

        gang = await restored(made, gang, parked, "n2", 2)
        await goes_on(made, "n2", uid, 2)
        sees_its_own_alone(runs_as_ann(these, "n2", 2))

        await made.master.until("n2", 2, lambda seen: seen.capabilities.can_checkpoint)
        new = await moved_in(made, gang, "n1")
        await made.master.until("n2", 2, in_phase(Observed.PHASE_PARKED))
        parts.append(counts(made, "n2", uid, 2))
        old, gang = gang, with_changes(new, 2, intent=Intents.INTENT_RUN)
        await made.master.want("n1", gang)
        await made.master.until("n1", 3, in_phase(Observed.PHASE_RUNNING))
        await goes_on(made, "n1", uid, 3)
        sees_its_own_alone(runs_as_ann(these, "n1", 3))
        await ended(made, "n2", old)
        parts.append(counts(made, "n1", uid, 3))
        assert one_after_the_other(*parts)
        await ended(made, "n1", gang)
        await until_nothing_is_left(uid)

    run(story)


TRAINING = """
import hashlib, time, torch
torch.manual_seed(3)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Dropout(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters())
samples = torch.utils.data.TensorDataset(torch.randn(2400, 32))
for number, (batch,) in enumerate(torch.utils.data.DataLoader(samples, batch_size=8, shuffle=True)):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    print("step", number, flush=True)
    time.sleep(0.01)
weights = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
print("end", hashlib.sha256(weights).hexdigest())
"""


@pytest.mark.torch
def test_an_unmodified_script_of_an_account_ends_bit_identical_after_a_restore_and_a_move() -> None:
    async def story(these: Accounted) -> None:
        made = these.made
        script = Path(these.ann.home) / "train.py"
        script.write_text(TRAINING)
        os.chown(script, these.ann.uid, these.ann.gid)
        await these.daemon("n1")
        await these.daemon("n2")

        def begin(epoch: int) -> Any:
            gang = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), epoch=epoch, command=[made.python, str(script)])
            gang.spec.mechanism = job_pb2.MECHANISM_IMAGE
            return gang

        def lines(gang: Any, node: str, word: str) -> list[str]:
            found = log_of(made.directory, node, gang.job_uid, 0, gang.epoch)
            return [line for line in found if line.startswith(word)]

        whole = begin(1)
        await made.master.want("n1", whole)
        ending = await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED), patience=60)
        assert ending.outcome.kind == agent_pb2.Outcome.KIND_DONE, ending
        end = lines(whole, "n1", "end")
        await made.master.forget("n1", 1)

        gang = begin(2)
        await made.master.want("n1", gang)
        await made.master.until("n1", 2, lambda seen: seen.capabilities.can_checkpoint)
        await until(lambda: len(lines(gang, "n1", "step")) > 3)
        parked = await saved(made, "n1", gang)
        steps = lines(gang, "n1", "step")
        await made.master.forget("n1", 2)
        first = await restored(made, gang, parked, "n2", 3)
        await until(lambda: len(lines(first, "n2", "step")) > 3)
        await made.master.until("n2", 3, lambda seen: seen.capabilities.can_checkpoint)
        new = await moved_in(made, first, "n1")
        steps += lines(first, "n2", "step")
        await made.master.want("n1", with_changes(new, 2, intent=Intents.INTENT_RUN))
        ending = await made.master.until("n1", 4, in_phase(Observed.PHASE_ENDED), patience=60)
        assert ending.outcome.kind == agent_pb2.Outcome.KIND_DONE, ending
        assert steps + lines(new, "n1", "step") == [f"step {number}" for number in range(300)]
        assert lines(new, "n1", "end") == end != []

    run(story)


def test_a_file_that_a_job_replaces_by_a_link_is_opened_with_its_own_rights_when_it_is_restored() -> None:
    holds = opaque("held = open('held', 'r+')\n")

    async def story(these: Accounted) -> None:
        made, uid = these.made, str(uuid.uuid4())
        held, secret = Path(these.ann.home) / "held", made.directory / "secret"
        for path in (held, secret):
            path.write_text("0123456789")
            path.chmod(0o600)
        os.chown(held, these.ann.uid, these.ann.gid)
        await these.daemon("n1")
        gang = await begun(made, "opaque", uid, holds)
        parked = await saved(made, "n1", gang)
        await made.master.forget("n1", 1)
        held.unlink()
        held.symlink_to(secret)
        await made.master.want("n1", from_image(made, gang, parked, "n1", 2))
        refused = await made.master.until("n1", 2, in_phase(Observed.PHASE_ENDED))
        assert f"{held} cannot be opened" in refused.outcome.message
        assert "Permission denied" in refused.outcome.message
        # it is its own rights that count: what it may open, it gets
        held.unlink()
        held.write_text("0123456789")
        held.chmod(0o600)
        os.chown(held, these.ann.uid, these.ann.gid)
        await made.master.forget("n1", 2)
        gang = await restored(made, gang, parked, "n1", 3)
        await goes_on(made, "n1", uid, 3)
        await ended(made, "n1", gang)
        await until_nothing_is_left(uid)

    run(story)


def test_a_file_that_a_job_has_written_on_is_not_cut_back_through_a_link() -> None:
    writes = opaque("out = open('out', 'w')\n", "print(count, file=out, flush=True)")

    async def story(these: Accounted) -> None:
        made, uid = these.made, str(uuid.uuid4())
        out, other = Path(these.ann.home) / "out", made.directory / "other"
        await these.daemon("n1")
        gang = await begun(made, "opaque", uid, writes)
        parked = await saved(made, "n1", gang)
        await made.master.forget("n1", 1)
        other.write_bytes(b"x" * 100_000)
        other.chmod(0o644)
        out.unlink()
        out.symlink_to(other)
        await made.master.want("n1", from_image(made, gang, parked, "n1", 2))
        refused = await made.master.until("n1", 2, in_phase(Observed.PHASE_ENDED))
        assert "Permission denied" in refused.outcome.message
        assert other.stat().st_size == 100_000

    run(story)


def test_a_process_in_a_user_namespace_of_its_own_is_in_no_image() -> None:
    begin = "import subprocess\nother = subprocess.Popen(['unshare', '--user', '--map-root-user', 'sleep', '600'])\n"

    async def story(these: Accounted) -> None:
        made, uid = these.made, str(uuid.uuid4())
        await these.daemon("n1")
        gang = await begun(made, "opaque", uid, begin + OPAQUE)
        await made.master.want("n1", with_changes(gang, 2, stop_sequence=2, **CHECKPOINT))
        refused = await made.master.until("n1", 1, lambda seen: "IMAGE_REFUSED" in seen.trouble)
        assert f"has rights that {these.ann.name} has not" in refused.trouble

    run(story)


def test_a_job_whose_account_has_another_uid_on_the_other_node_goes_on_where_it_is() -> None:
    async def story(these: Accounted) -> None:
        made, uid = these.made, str(uuid.uuid4())
        accounts, storage = made.directory / "accounts", made.directory / "storage-2"
        accounts.write_text(f"{these.ann.name} {these.bob.name}\n")
        storage.mkdir(mode=0o711)
        shutil.copy(made.storage / ".ganger-token", storage)
        await these.daemon("n1")
        await these.daemon("n2", accounts=str(accounts), storage=storage)
        made.place = made.directory
        made.directory.chmod(0o755)
        gang = await begun(made, "opaque", uid)
        new = await expected(made, gang)
        await handed_over(made, gang)
        refused = await made.master.until("n2", 2, lambda seen: bool(seen.trouble))
        ann, bob = these.ann, these.bob
        text = f"it is of uid {ann.uid} and gid {ann.gid}, and the job runs here as {bob.name} ({bob.uid}, {bob.gid})"
        assert text in refused.trouble
        await ended(made, "n2", new)
        await made.master.want("n1", with_changes(gang, 3))
        await goes_on(made, "n1", uid)
        assert one_after_the_other(counts(made, "n1", uid, 1))

    run(story)


ANN = Account("ann", 1001, 1001, (1001,), "/")


@pytest.mark.parametrize(
    ("owner", "account", "refusal"),
    [
        ((1001, 1001), ANN, ""),
        ((0, 0), None, ""),
        ((1002, 1001), ANN, "it is of uid 1002 and gid 1001, and the job runs here as ann (1001, 1001)"),
        ((1001, 1002), ANN, "it is of uid 1001 and gid 1002, and the job runs here as ann (1001, 1001)"),
        ((0, 0), ANN, "it is of uid 0 and gid 0, and the job runs here as ann (1001, 1001)"),
        ((1001, 1001), None, "it is of uid 1001 and gid 1001, and the job runs here as root (0, 0)"),
    ],
)
def test_an_image_is_restored_for_the_account_alone_that_its_facts_name(
    owner: tuple[int, int], account: Account | None, refusal: str
) -> None:
    facts = ImageFacts(1, 1, (), (), (), Machine("any", (), "any", "any"), owner=owner)
    assert facts.foreign(account) == refusal


def test_an_image_that_a_job_may_have_written_is_not_restored() -> None:
    async def story(these: Accounted) -> None:
        made, uid = these.made, str(uuid.uuid4())
        await these.daemon("n1")
        gang = await begun(made, "opaque", uid)
        parked = await saved(made, "n1", gang)
        await made.master.forget("n1", 1)
        image = made.storage / uid / parked.checkpoint.path
        forged = made.storage / uid / "checkpoints" / image.name
        shutil.copytree(image, forged)
        shutil.rmtree(image)
        for path in (forged, *forged.iterdir()):
            os.chown(path, these.ann.uid, these.ann.gid)
        again = from_image(made, gang, parked, "n1", 2)
        again.restore.checkpoint_path = f"checkpoints/{image.name}"
        await made.master.want("n1", again)
        refused = await made.master.until("n1", 2, in_phase(Observed.PHASE_ENDED))
        assert refused.outcome.message == f"{forged} is a process image that its job may have written"

    run(story)


@pytest.mark.parametrize("point", ["image-dumped", "image-packed"])
def test_a_daemon_that_dies_while_it_saves_an_accounts_image_loses_nothing(point: str) -> None:
    run(lambda these: saves_while_its_daemon_dies(these.made, "opaque", point))


@pytest.mark.parametrize(
    ("point", "victim"), [("image-packed", "n1"), ("image-unpacked", "n2"), ("image-restored", "n2")]
)
def test_a_move_of_an_accounts_job_in_which_a_daemon_dies_never_runs_it_twice(point: str, victim: str) -> None:
    run(lambda these: moves_while_a_daemon_dies(these.made, "opaque", point, victim))


def test_an_accounts_launcher_that_dies_while_an_image_is_taken_loses_nothing() -> None:
    run(lambda these: saves_while_its_launcher_dies(these.made, these.made.directory / "criu"))


def test_the_launcher_that_restores_for_accounts_leaves_nothing_where_it_dies_before_it_has_recorded_that() -> None:
    def restorer(made: Cluster) -> int:
        found = made.daemons["n1"].host.launchers.running_restorer()
        assert found is not None, "it restores"
        return found.pid

    run(lambda these: restores_while_its_launcher_dies(these.made, these.made.directory / "criu", restorer))
