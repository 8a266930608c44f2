"""Scripts in the usual shape of their kind, for kinds of which no public program runs without a download.

They are texts, written into the directory of a run: Ganger's own environment lacks what they import.
"""

from __future__ import annotations

_DATA = """
import torch
from torch import nn


class Pairs(torch.utils.data.Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, 32, generator=generator)
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def network(width=256):
    inner = nn.Sequential(nn.Linear(width, width), nn.ReLU())
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Dropout(0.1), inner, nn.Linear(width, 2))
"""

HF_TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Tokens(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        self.rows = torch.randint(0, 100, (count, 32), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main():
    set_seed(7)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=32, n_embd=64, n_layer=2, n_head=4))
    arguments = TrainingArguments(
        output_dir="out", num_train_epochs=2, per_device_train_batch_size=8, logging_steps=10, save_steps=100,
        eval_strategy="steps", eval_steps=100, save_total_limit=2, report_to="none", disable_tqdm=True, seed=7,
        load_best_model_at_end=True, metric_for_best_model="loss", gradient_accumulation_steps=2,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens(1600, 1), eval_dataset=Tokens(80, 2))
    trainer.train()
    trainer.save_model("final")


if __name__ == "__main__":
    main()
"""

ACCELERATE_LOOP = (
    _DATA
    + """
from accelerate import Accelerator
from accelerate.utils import set_seed


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    set_seed(3)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(Pairs(3200), batch_size=8, shuffle=True)
    held_out = torch.utils.data.DataLoader(Pairs(400), batch_size=50)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 2000)
    model, optimizer, loader, held_out, schedule = accelerator.prepare(model, optimizer, loader, held_out, schedule)
    step = 0
    for epoch in range(8):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            step += 1
            if step % 20 == 0:
                accelerator.print(f"epoch {epoch} step {step} loss {loss.item():.9f}")
        model.eval()
        right = 0
        for x, y in held_out:
            with torch.no_grad():
                guess = model(x).argmax(1)
            guess, y = accelerator.gather_for_metrics((guess, y))
            right += (guess == y).sum().item()
        accelerator.print(f"epoch {epoch}: {right} of 400")
        accelerator.save_state(f"out/epoch-{epoch}")
    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "final.pt")


if __name__ == "__main__":
    main()
"""
)

LIGHTNING_MODULE = (
    _DATA
    + """
import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, on_step=True)
        if batch_idx % 20 == 0:
            print(f"epoch {self.current_epoch} batch {batch_idx} loss {loss.item():.9f}", flush=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y), on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    L.seed_everything(11)
    train = torch.utils.data.DataLoader(Pairs(3200), batch_size=8, shuffle=True)
    held_out = torch.utils.data.DataLoader(Pairs(400), batch_size=50)
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", devices=1, enable_progress_bar=False, log_every_n_steps=10,
        logger=CSVLogger("logs"),
        callbacks=[
            ModelCheckpoint("checkpoints", monitor="val_loss", save_top_k=2),
            EarlyStopping("val_loss", patience=4),
        ],
    )
    model = Classifier()
    trainer.fit(model, train, held_out)
    torch.save(model.state_dict(), "final.pt")


if __name__ == "__main__":
    main()
"""
)

DDP = (
    _DATA
    + """
import sys
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = DDP(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = Pairs(4800 * size)
    sampler = DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(int(sys.argv[1])):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for batch, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if rank == 0 and batch % 20 == 0:
                print(f"epoch {epoch} batch {batch} loss {loss.item():.9f}", flush=True)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} total {total.item():.9f}", flush=True)
            torch.save(model.module.state_dict(), "final.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
)

FSDP2 = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(100, 64), encoder, nn.Linear(64, 100))
    for block in model[1].layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    for step in range(400):
        tokens = torch.randint(0, 100, (4, 32), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 and rank == 0:
            print(f"step {step} loss {loss.item():.9f}", flush=True)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(whole, "final.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""

TENSOR_PARALLEL = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(64) for _ in range(3)))
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    generator = torch.Generator().manual_seed(5)
    for step in range(1500):
        x = torch.randn(32, 64, generator=generator)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and rank == 0:
            print(f"step {step} loss {loss.item():.9f}", flush=True)
    state = model.state_dict()
    whole = {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in state.items()}
    if rank == 0:
        torch.save(whole, "final.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""

JAX_LOOP = """
import jax
import jax.numpy as jnp
import numpy as np
import optax


def loss_of(parameters, x, y):
    for weight, bias in parameters[:-1]:
        x = jnp.tanh(x @ weight + bias)
    weight, bias = parameters[-1]
    return jnp.mean((x @ weight + bias - y) ** 2)


def main():
    random = np.random.default_rng(0)
    x, y = random.normal(size=(4096, 32)).astype("float32"), random.normal(size=(4096, 1)).astype("float32")
    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    sizes = [(32, 256), (256, 256), (256, 1)]
    parameters = [(jax.random.normal(key, size) * 0.05, jnp.zeros(size[1])) for key, size in zip(keys, sizes)]
    optimizer = optax.adam(1e-3)
    state = optimizer.init(parameters)

    @jax.jit
    def update(parameters, state, x, y):
        loss, gradients = jax.value_and_grad(loss_of)(parameters, x, y)
        changes, state = optimizer.update(gradients, state)
        return optax.apply_updates(parameters, changes), state, loss

    for epoch in range(1000):
        order = random.permutation(len(x))
        for begin in range(0, len(x), 64):
            chosen = order[begin : begin + 64]
            parameters, state, loss = update(parameters, state, x[chosen], y[chosen])
            if begin == 0:
                print(f"epoch {epoch} batch {begin // 64} loss {float(loss):.9f}", flush=True)
    np.savez("final.npz", *[np.asarray(part) for part in jax.tree_util.tree_leaves(parameters)])


if __name__ == "__main__":
    main()
"""

SQLITE_LOG = (
    _DATA
    + """
import os
import sqlite3


def main():
    torch.manual_seed(1)
    runs = sqlite3.connect("runs.db")
    runs.execute("create table loss (epoch integer, batch integer, value real)")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(Pairs(3200), batch_size=8, shuffle=True)
    best = float("inf")
    for epoch in range(6):
        total = 0.0
        for batch, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
            with runs:
                runs.execute("insert into loss values (?, ?, ?)", (epoch, batch, loss.item()))
            if batch % 20 == 0:
                print(f"epoch {epoch} batch {batch} loss {loss.item():.9f}", flush=True)
        if total < best:
            best = total
            torch.save(model.state_dict(), "best.pt.new")
            os.rename("best.pt.new", "best.pt")
    rows = runs.execute("select count(*), sum(value) from loss").fetchone()
    print(f"{rows[0]} rows, sum {rows[1]:.9f}")
    torch.save(model.state_dict(), "final.pt")


if __name__ == "__main__":
    main()
"""
)

TENSORBOARD_LOG = (
    _DATA
    + """
from torch.utils.tensorboard import SummaryWriter


def main():
    torch.manual_seed(2)
    writer = SummaryWriter("runs")
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    loader = torch.utils.data.DataLoader(
        Pairs(3200), batch_size=8, shuffle=True, num_workers=2, persistent_workers=True
    )
    step = 0
    for epoch in range(8):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            writer.add_scalar("loss/train", loss.item(), step)
            step += 1
            if step % 20 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.9f}", flush=True)
        schedule.step()
        writer.add_scalar("lr", schedule.get_last_lr()[0], epoch)
        for name, parameter in model.named_parameters():
            writer.add_histogram(name, parameter, epoch)
    writer.close()
    torch.save(model.state_dict(), "final.pt")


if __name__ == "__main__":
    main()
"""
)

DQN = """
import collections
import random

import gymnasium as gym
import numpy as np
import torch
from torch import nn


def main():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    env = gym.make("CartPole-v1")
    env.action_space.seed(0)
    online, target = (nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 2)) for _ in range(2))
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
    memory = collections.deque(maxlen=5000)
    state, _ = env.reset(seed=0)
    reward_sum, episode = 0.0, 0
    for step in range(4000):
        if random.random() < max(0.05, 1 - step / 2000):
            action = env.action_space.sample()
        else:
            action = int(online(torch.as_tensor(state)[None]).argmax())
        following, reward, terminated, truncated, _ = env.step(action)
        memory.append((state, action, reward, following, terminated))
        reward_sum += reward
        state = following
        if terminated or truncated:
            episode += 1
            if episode % 5 == 0:
                print(f"step {step} episode {episode} reward {reward_sum}", flush=True)
            state, _ = env.reset()
            reward_sum = 0.0
        if len(memory) >= 200:
            states, actions, rewards, followings, ends = zip(*random.sample(memory, 64))
            with torch.no_grad():
                best = target(torch.as_tensor(np.array(followings))).max(1).values
                wanted = torch.tensor(rewards) + 0.99 * best * (1 - torch.tensor(ends, dtype=torch.float32))
            found = online(torch.as_tensor(np.array(states))).gather(1, torch.tensor(actions)[:, None])[:, 0]
            loss = nn.functional.smooth_l1_loss(found, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step % 200 == 0:
            target.load_state_dict(online.state_dict())
    torch.save(online.state_dict(), "final.pt")


if __name__ == "__main__":
    main()
"""

STABLE_BASELINES = """
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback


class Printing(BaseCallback):
    def _on_step(self):
        return True

    def _on_rollout_end(self):
        print(f"steps {self.num_timesteps} value {self.model.rollout_buffer.values.mean():.9f}", flush=True)


def main():
    model = PPO("MlpPolicy", "CartPole-v1", seed=4, n_steps=256, device="cpu")
    model.learn(4000, callback=Printing())
    model.policy.save("final.pt")


if __name__ == "__main__":
    main()
"""

SCRIPTS = {
    "hf-trainer": HF_TRAINER,
    "accelerate-loop": ACCELERATE_LOOP,
    "lightning-module": LIGHTNING_MODULE,
    "torchrun-1": DDP,
    "torchrun-2": DDP,
    "fsdp2": FSDP2,
    "tensor-parallel": TENSOR_PARALLEL,
    "jax-loop": JAX_LOOP,
    "sqlite-log": SQLITE_LOG,
    "tensorboard-log": TENSORBOARD_LOG,
    "dqn": DQN,
    "stable-baselines": STABLE_BASELINES,
}
