"""The words of a control page: offset, writer and meaning of each. A word is 64 bits, little-endian. Orders go down,
progress comes up. Lines of eight words have one writer each. Times are nanoseconds of CLOCK_BOOTTIME."""

from __future__ import annotations

PAGE_BYTES = 4096
MAGIC = 0x5245474E4147  # "GANGER"
VERSION = 1

# Set in every CHECKPOINT_SEQ, so that it never equals a STOP_SEQ: both name agreements in ACK_SEQ.
CHECKPOINT_BIT = 1 << 62


class Word:
    """Index of each word. D: written by the daemon, L: by the launcher, J: by the job."""

    # Line 0: identity, filled before the user's code starts.
    MAGIC = 0  # D: MAGIC << 16 | VERSION
    EPOCH = 1  # D
    RANK = 2  # D
    WORLD = 3  # D
    PID = 4  # L
    START_TICKS = 5  # L
    FLAGS = 6  # D: see Flag
    LOCAL_RANK = 7  # D

    # Line 1: the order; ORDER_SEQ is written last.
    ORDER_SEQ = 8  # D: raised with every new order
    ORDER = 9  # D: see Order
    STOP_SEQ = 10  # D: identifies the boundary agreement of a stop; 0 with RUN
    LEVEL = 11  # D: see Level
    DEADLINE = 12  # D: when the daemon escalates; 0 never
    LEASE_UNTIL = 13  # D: stop at a boundary once past; 0 never. Changes without ORDER_SEQ
    CHECKPOINT_SEQ = 14  # D: raised to ask for a checkpoint to storage at the next agreed boundary, going on afterwards
    ARENA_AVAILABLE = 15  # D: bytes of state received into the arena so far (destination of a move)

    # Line 2: cores
    RETUNE_SEQ = 16  # D: raised after THREADS is written
    THREADS = 17  # D
    LEAVE_SEQ = 19  # D: highest ORDER_SEQ whose checkpoint is published: a rank that saved for it may end now
    STACKS_SEQ = 20  # D: raised to ask for the stacks of all threads, in the log
    IMAGED_SEQ = 21  # D: agreement whose process image was taken, or given up: a rank that waits for it may continue

    # Line 3: the boundary
    ACK_SEQ = 24  # J: STOP_SEQ acked; written after ACK_STEP
    ACK_STEP = 25  # J: acks never change
    STATE = 26  # J: see State
    REACHED_SEQ = 27  # J: highest ORDER_SEQ fully carried out
    REACHED_STEP = 28  # J: step at which it stopped (K)
    ARENA_FILLED = 29  # J: bytes of state in the arena so far (grows while it is being filled)
    ARENA_SIZE = 30  # J: bytes of the complete state image; 0 until known
    RETUNE_DONE = 31  # J: highest RETUNE_SEQ applied

    # Line 4: progress
    STEP = 32  # J: boundaries passed; written after ack words
    SAMPLES = 33  # J
    STEP_TIME = 34  # J: time of the last boundary
    LOSS = 35  # J: float64 bits; 0 not reported: a loss of zero is -0.0
    DATA_WAIT = 36  # J: ns spent waiting for data so far
    TRAINING_EPOCH = 37  # J
    PHASE = 38  # J: see Phase
    FIRST_STEP_TIME = 39  # J: time of the first boundary after the last start or resume

    # Line 5: what the job is.
    CAPABILITIES = 40  # J: see Capability
    LOCK = 41  # J: pid of the process whose optimizer steps; the first one wins
    DEVICE_BYTES = 42  # J: device memory in use by the framework (virtual device: bytes of live tensor storages)
    PEAK_DEVICE_BYTES = 43  # J
    OFFLOADED_BYTES = 44  # J: device bytes freed by the last OFFLOAD
    EXIT_CODE = 45  # J: exit code + 1, for when no launcher is there to record it; 0 unknown
    CHECKPOINT_DONE = 46  # J: highest CHECKPOINT_SEQ whose shard is durable
    CHECKPOINT_STEP = 47  # J: its step
    RESTORED_STEP = 48  # J: step from which this epoch started
    HELLO_TIME = 49  # J: when the agent attached; 0 not yet
    THREADS_APPLIED = 50  # J
    ERROR = 51  # J: see Error; details in rank-K.error.json
    RESIZE_DIVIDES = 52  # J: numbers of ranks it may continue with divide this; 0 any (see Capability.RESIZE)
    TRAINING_EPOCHS = 53  # J: of which TRAINING_EPOCH is one, from 0; 0 not reported
    OPAQUE = 54  # J, or a process that the rank started: see Opaque; once set it stays
    CHECKPOINT_FAILED = 55  # J: newest CHECKPOINT_SEQ whose shard could not be written; written after ERROR

    # Line 7: evaluation
    EVALUATED = 56  # J: mini-batches evaluated so far; written after EVALUATED_TIME
    EVALUATED_TIME = 57  # J: time of the last one
    EVALUATED_BEFORE = 58  # J: EVALUATED when this evaluation began


# Lines 8 to 15: what the job reports by name. J: how often it did (written last, 0 while the line changes), the step,
# the value as float64 bits, nothing, and the name in 32 bytes.
METRICS_FIRST = 64
METRIC_LINES = 8
METRIC_NAME_BYTES = 32


class Flag:
    FENCED = 1  # This epoch is over: exit with EXIT_FENCED at the next boundary
    RESTORED = 2  # Its process comes from a process image: the pid that it has inside its unit is another one


class PageOrderKind:
    RUN = 1
    STOP = 2  # Stop at an agreed boundary, at LEVEL
    WAIT = 3  # Do not step yet (destination of a move): restore, then wait for RUN


class PageParkLevel:
    PAUSE = 1
    OFFLOAD = 2
    CHECKPOINT = 3  # Write shard, rest until LEAVE_SEQ, then exit with EXIT_YIELDED
    HAND_OVER = 4  # State into the arena, tensors may stay; wait


class PageState:
    INIT = 0
    RUNNING = 1
    WAITING = 2  # Acked, waits for the others or for RUN
    PAUSED = 3
    OFFLOADED = 4
    HANDED_OVER = 5
    SAVING = 6
    RESTORING = 7
    READY = 8  # Restored, waits for RUN
    EXITING = 9


class PagePhase:
    START = 0  # Before the first boundary
    TRAINING = 1
    EVALUATION = 2
    COMPILATION = 3
    REPLAY = 4  # The zero-line agent goes back to its position
    DONE = 5  # Left its loop: acks at its last step


class Capability:
    PAUSE = 1
    OFFLOAD = 2
    CHECKPOINT = 4
    FIVE_LINE = 8  # The script attached by itself
    OPAQUE = 16  # The agent gave up on this script
    RESIZE = 32  # Its state can be brought back with another number of ranks
    RESHARD = 128  # As RESIZE, but only from a checkpoint on storage: each rank has a part of the state
    ADAPTER = 64  # Its state is saved and restored through a trainer that the agent knows
    IMAGE = 256  # Its CHECKPOINT and HAND_OVER are process images: it waits, and the daemon takes them
    REPLAY = 512  # Its state is for a second run of its script


class Opaque:
    """Why a rank cannot obey orders at boundaries. The sentence for people is in rank-K.no-BOUNDARIES.json."""

    NO = 0
    TRAINS_IN_CHILD = 1  # The process that trains is not the one that was launched
    SEVERAL_TRAIN = 2  # More than one of the rank's processes trains
    AGENT_FAILED = 3  # The agent met what it cannot handle


class Error:
    NONE = 0
    STATE_UNREADABLE = 1
    STATE_UNSAVEABLE = 2
    ARENA_TOO_SMALL = 3
    STORAGE_FULL = 4
    STORAGE_FAILED = 5


EXIT_YIELDED = 75
EXIT_FENCED = 76
EXIT_NO_STATE = 77  # What it was ordered to restore cannot be read
