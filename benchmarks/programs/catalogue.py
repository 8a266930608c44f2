"""The programs, one a row of the table."""

from __future__ import annotations

from benchmarks.programs.program import Program

_LOSS = r"^(epoch|step).*$"
# Without its times.
_NANOGPT = r"^(step \d+: .*|iter \d+: loss [\d.]+)"
_MINGPT = r"iter \d+: train loss [\d.]+|saving model|^O God.*"
_TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node")

FROM_SOURCES = (
    Program(
        "nanogpt",
        "language model with its own loop, batches and checkpoints",
        (
            *("python", "train.py", "config/train_shakespeare_char.py", "--device=cpu", "--compile=False"),
            *("--eval_iters=2", "--eval_interval=100", "--log_interval=1", "--block_size=64", "--batch_size=8"),
            *("--n_layer=3", "--n_head=4", "--n_embd=64", "--max_iters=400", "--lr_decay_iters=400", "--dropout=0.1"),
        ),
        source="karpathy/nanoGPT",
        inputs=("characters",),
        weights="out-shakespeare-char/ckpt.pt",
        log=_NANOGPT,
    ),
    Program(
        "mingpt",
        "trainer class with callbacks, two loader workers",
        (
            *("python", "projects/chargpt/chargpt.py", "--model.model_type=gpt-nano", "--data.block_size=48"),
            *("--trainer.max_iters=501", "--trainer.batch_size=16", "--trainer.num_workers=2"),
        ),
        source="karpathy/minGPT",
        inputs=("text",),
        weights="out/chargpt/model.pt",
        log=_MINGPT,
        environment={"PYTHONPATH": "."},
    ),
    Program(
        "mnist",
        "convolutional network, StepLR, evaluation after each epoch",
        ("python", "main.py", "--epochs", "4", "--batch-size", "32", "--log-interval", "5", "--save-model"),
        source="pytorch/examples",
        directory="mnist",
        inputs=("mnist:..",),
        weights="mnist/mnist_cnn.pt",
        packages=("torch", "torchvision"),
    ),
    Program(
        "hogwild",
        "a process of torch.multiprocessing trains a model in shared memory",
        ("python", "main.py", "--num-processes", "1", "--epochs", "6", "--log-interval", "5", "--save_model"),
        source="pytorch/examples",
        directory="mnist_hogwild",
        inputs=("mnist:..",),
        # without the process id
        log=r"(Train Epoch.*|Test set.*)",
        packages=("torch", "torchvision"),
    ),
)

WRITTEN = (
    Program(
        "hf-trainer",
        "Hugging Face Trainer: GPT-2, accumulation, evaluation, best model",
        ("python", "hf-trainer.py"),
        weights="final/model.safetensors",
        log=r"'(?:eval_)?loss': '?[\d.e-]+",
        # they hold the speed and the seconds of an evaluation
        ignored=("*/trainer_state.json", "*/training_args.bin"),
        packages=("transformers", "accelerate", "torch"),
    ),
    Program(
        "accelerate-loop",
        "Accelerate: loop with accumulation and save_state",
        ("python", "accelerate-loop.py"),
        weights="final.pt",
        packages=("accelerate", "torch"),
        log=_LOSS,
    ),
    Program(
        "lightning-module",
        "Lightning Trainer: checkpoints, early stopping, CSV log",
        ("python", "lightning-module.py"),
        weights="final.pt",
        log=_LOSS,
        packages=("lightning", "torch"),
    ),
    Program(
        "torchrun-1",
        "torchrun with one rank, DDP",
        (*_TORCHRUN, "1", "torchrun-1.py"),
        weights="final.pt",
        log=_LOSS,
    ),
    Program(
        "torchrun-2",
        "torchrun with two ranks, DDP",
        (*_TORCHRUN, "2", "torchrun-2.py"),
        weights="final.pt",
        log=_LOSS,
    ),
    Program(
        "fsdp2",
        "FSDP2 (fully_shard) on two ranks",
        (*_TORCHRUN, "2", "fsdp2.py"),
        weights="final.pt",
        log=_LOSS,
    ),
    Program(
        "tensor-parallel",
        "tensor parallel on two ranks",
        (*_TORCHRUN, "2", "tensor-parallel.py"),
        weights="final.pt",
        log=_LOSS,
    ),
    Program(
        "jax-loop",
        "JAX and Optax: jit-compiled update",
        ("python", "jax-loop.py"),
        weights="final.npz",
        packages=("jax", "optax"),
    ),
    Program(
        "sqlite-log",
        "writes each loss to a database, renames its best checkpoint",
        ("python", "sqlite-log.py"),
        weights="final.pt",
    ),
    Program(
        "tensorboard-log",
        "writes TensorBoard events; persistent loader workers",
        ("python", "tensorboard-log.py"),
        weights="final.pt",
        packages=("tensorboard", "torch"),
    ),
    Program(
        "dqn",
        "DQN loop with a replay memory and an environment",
        ("python", "dqn.py"),
        weights="final.pt",
        packages=("gymnasium", "torch"),
    ),
    Program(
        "stable-baselines",
        "Stable-Baselines3: PPO",
        ("python", "stable-baselines.py"),
        weights="final.pt",
        packages=("stable-baselines3", "gymnasium", "torch"),
    ),
)

CATALOGUE = (*FROM_SOURCES, *WRITTEN)
