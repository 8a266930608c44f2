"""The programs, one a row of the table."""

from __future__ import annotations

from benchmarks.programs.program import Program

_LOSS = r"^(?:epoch|step).*"
# Without its times.
_NANOGPT = r"^(?:step \d+: .*|iter \d+: loss [\d.]+)"
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
        ("python", "main.py", "--epochs", "3", "--batch-size", "32", "--log-interval", "5", "--save-model"),
        source="pytorch/examples",
        directory="mnist",
        inputs=("mnist:../data",),
        weights="mnist/mnist_cnn.pt",
        packages=("torch", "torchvision"),
    ),
    Program(
        "hogwild",
        "a process of torch.multiprocessing trains a model in shared memory",
        ("python", "main.py", "--num-processes", "1", "--epochs", "6", "--log-interval", "5", "--save_model"),
        source="pytorch/examples",
        directory="mnist_hogwild",
        inputs=("mnist:../data",),
        # Without the process id
        log=r"(?:Train Epoch|Test set).*",
        packages=("torch", "torchvision"),
    ),
    Program(
        "vae",
        "variational autoencoder, pictures after each epoch",
        ("python", "main.py", "--epochs", "6", "--batch-size", "32", "--log-interval", "5"),
        source="pytorch/examples",
        directory="vae",
        inputs=("mnist:../data",),
        weights="vae/results/sample_6.png",
        packages=("torch", "torchvision"),
    ),
    Program(
        "word-language-model",
        "LSTM without an optimizer object, annealed by its validation",
        (
            *("python", "main.py", "--epochs", "90", "--emsize", "64", "--nhid", "64", "--bptt", "12"),
            *("--log-interval", "5", "--save", "model.pt"),
        ),
        source="pytorch/examples",
        directory="word_language_model",
        inputs=("words:data/wikitext-2",),
        weights="word_language_model/model.pt",
        log=r"(\| epoch +\d+ \| +\d+/).*(loss .*)|(valid loss .*)",
    ),
    Program(
        "mnist-rnn",
        "LSTM, Adadelta with StepLR",
        ("python", "main.py", "--epochs", "5", "--batch-size", "16", "--log-interval", "5", "--save-model"),
        source="pytorch/examples",
        directory="mnist_rnn",
        inputs=("mnist:../data",),
        weights="mnist_rnn/mnist_rnn.pt",
        packages=("torch", "torchvision"),
    ),
    Program(
        "dcgan",
        "two networks with two optimizers, loader workers, pictures",
        (
            *("python", "main.py", "--dataset", "fake", "--niter", "1", "--batchSize", "8", "--ngf", "8", "--ndf", "8"),
            *("--manualSeed", "3", "--workers", "1"),
        ),
        source="pytorch/examples",
        directory="dcgan",
        weights="dcgan/netG_epoch_0.pth",
        packages=("torch", "torchvision"),
    ),
    Program(
        "cleanrl-dqn",
        "DQN in one file, replay memory, TensorBoard",
        (
            *("python", "cleanrl/dqn.py", "--total-timesteps", "12000", "--learning-starts", "500", "--no-cuda"),
            *("--buffer-size", "5000"),
        ),
        source="vwxyzjn/cleanrl",
        weights="*.tfevents*/losses/td_loss",
        # It prints and records steps per second.
        log=None,
        ignored=("charts/SPS",),
        environment={"PYTHONPATH": "."},
        packages=("torch", "gymnasium", "tensorboard"),
    ),
    Program(
        "cleanrl-ppo",
        "PPO in one file with several environments",
        ("python", "cleanrl/ppo.py", "--total-timesteps", "24000", "--no-cuda"),
        source="vwxyzjn/cleanrl",
        weights="*.tfevents*/losses/value_loss",
        log=None,
        ignored=("charts/SPS",),
        environment={"PYTHONPATH": "."},
        packages=("torch", "gymnasium", "tensorboard"),
    ),
    Program(
        "fabric",
        "Lightning Fabric: image classifier",
        ("python", "train_fabric.py", "--epochs", "2", "--batch-size", "32", "--log-interval", "5", "--save-model"),
        source="Lightning-AI/pytorch-lightning",
        directory="examples/fabric/image_classifier",
        inputs=("mnist:../../../Datasets",),
        weights="examples/fabric/image_classifier/mnist_cnn.pt",
        log=r"^(?:Train Epoch|Test set).*",
        packages=("torch", "torchvision", "lightning"),
    ),
    Program(
        "timm",
        "timm's train.py: augmentation, schedule, averaged weights, its own checkpoints",
        (
            *("python", "train.py", "--data-dir", "pictures", "--model", "resnet10t", "--num-classes", "4"),
            *("--img-size", "32", "-b", "8", "--epochs", "4", "--warmup-epochs", "1", "-j", "1", "--device", "cpu"),
            *("--model-ema", "--output", "out", "--experiment", "run", "--log-interval", "2", "--no-prefetcher"),
        ),
        source="huggingface/pytorch-image-models",
        inputs=("pictures:pictures",),
        weights="out/run/last.pth.tar",
        log=r"(Train: \d+ \[ *\d+/).*(Loss: +[\d.]+).*(LR: [\d.e-]+)|(Best metric: .*)",
        packages=("torch", "torchvision"),
    ),
)

FROM_PACKAGES = (
    Program(
        "rl-zoo",
        "command of rl_zoo3: DQN of Stable-Baselines3, monitor file",
        (
            *("python", "-m", "rl_zoo3.train", "--algo", "dqn", "--env", "CartPole-v1", "-n", "6000", "--seed", "1"),
            *("-f", "logs", "--eval-freq", "-1", "--num-threads", "1"),
        ),
        source="DLR-RM/rl-baselines3-zoo",
        is_packaged=True,
        weights="CartPole-v1.zip/policy.pth",
        log=r"(?:ep_len_mean|ep_rew_mean|loss|n_updates|total_timesteps) +\| [\d.e-]+",
        # Seconds of each episode; when it started.
        ignored=("*.monitor.csv", "*.zip/data"),
        packages=("rl_zoo3", "stable-baselines3", "torch"),
    ),
    Program(
        "pykeen",
        "command of PyKEEN: knowledge graph embeddings with an evaluation",
        (
            *("pykeen", "train", "transe", "--dataset", "nations", "-n", "30", "--random-seed", "3"),
            *("--output-directory", "out"),
        ),
        source="pykeen/pykeen",
        is_packaged=True,
        weights="out/trained_model.pkl",
        # A progress bar, drawn as time passes.
        log=None,
        # Compressed with the time; seconds of the evaluation.
        ignored=("*.tsv.gz", "*/results.json"),
        packages=("pykeen", "torch"),
    ),
    Program(
        "chemprop",
        "command of Chemprop: message passing network in Lightning",
        (
            *("chemprop", "train", "-i", "data.csv", "-o", "out", "--epochs", "20", "--data-seed", "1"),
            *("--pytorch-seed", "2", "--num-workers", "0", "--accelerator", "cpu"),
        ),
        source="chemprop/chemprop",
        is_packaged=True,
        inputs=("molecules",),
        weights="out/*/best.pt",
        # A progress bar, drawn as time passes.
        log=None,
        packages=("chemprop", "lightning", "torch"),
    ),
)

WRITTEN = (
    Program(
        "hf-trainer",
        "Hugging Face Trainer: GPT-2, accumulation, evaluation, best model",
        ("python", "hf-trainer.py"),
        weights="final/model.safetensors",
        log=r"'(?:eval_)?loss': '?[\d.e-]+",
        # They hold the speed and the seconds of an evaluation.
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
        (*_TORCHRUN, "1", "torchrun-1.py", "40"),
        weights="final.pt",
        log=_LOSS,
    ),
    Program(
        "torchrun-2",
        "torchrun with two ranks, DDP",
        (*_TORCHRUN, "2", "torchrun-2.py", "10"),
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

CATALOGUE = (*FROM_SOURCES, *FROM_PACKAGES, *WRITTEN)
