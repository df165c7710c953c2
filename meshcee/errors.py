"""Every error that a user of meshcee can meet, and the exit code that each one becomes.

The idea: code raises the narrowest class with one sentence that names the next thing to do; only the command line
turns it into an exit code. Anything else that escapes is a bug of ours (exit code 1).

    MeshceeError                    1  bug
    |-- UsageError                  2  a wrong flag, job file or argument
    |   `-- NotNowError             3  right as it is, and this machine cannot do it now: a full disk, a GPU that is not ready
    |-- JoinError                   3  nobody answers, another protocol version, a second peer with our identity
    |   `-- ClockError              3  this machine's clock and the mesh's are too far apart
    |-- CaptureError                4  the model cannot be captured
    |   `-- UnequalError           10  what would train, or has trained, is not equal to the plain loop
    |-- PlanError                   5  no feasible plan: the peers cannot hold the job
    |-- PeerLostError               6  a peer was lost and training cannot go on
    |-- NonFiniteLossError          7  the loss or a gradient became NaN or infinite
    |-- NotPermittedError           8  a wrong or expired token, a job that the peer does not accept
    |   `-- StaleTermError          8  planned by a coordinator that has been replaced: plan again
    |-- CheckpointError             9  a checkpoint that is damaged
    `-- ProtocolError               1  a frame or graph from the network that is malformed or out of order
        `-- GraphError              4  a graph from the network that is unsafe or malformed
"""

__all__ = [  # the kinds of errors, which peers name to one another
    "CaptureError",
    "CheckpointError",
    "ClockError",
    "GraphError",
    "JoinError",
    "MeshceeError",
    "NonFiniteLossError",
    "NotNowError",
    "NotPermittedError",
    "PeerLostError",
    "PlanError",
    "ProtocolError",
    "StaleTermError",
    "UnequalError",
    "UsageError",
]


class MeshceeError(Exception):
    """Base of all errors; `exit_code` is what the command line exits with."""

    exit_code = 1


class UsageError(MeshceeError):
    """The user asked for something that has no meaning; the message says what to type instead."""

    exit_code = 2


class NotNowError(UsageError):
    """This machine cannot do what was asked now, and may be able to later; the message says what to do meanwhile."""

    exit_code = 3


class JoinError(MeshceeError):
    """The mesh could not be joined."""

    exit_code = 3


class ClockError(JoinError):
    """This machine's clock and those of the mesh differ by too much to tell new records from old ones."""


class CaptureError(MeshceeError):
    """The model cannot be captured; the message names the operation and the line of the user's file."""

    exit_code = 4


class UnequalError(CaptureError):
    """The captured model, its cut, its codec or its data do something else than the plain loop. The message names the first
    tensor that differs and the line of the user's file. `blame` is "data", "capture", "cut" or "codec"."""

    exit_code = 10

    def __init__(self, message: str, blame: str = "capture") -> None:
        super().__init__(message)
        self.blame = blame


class PlanError(MeshceeError):
    """No plan fits; the message says how many bytes are missing on which peer."""

    exit_code = 5


class PeerLostError(MeshceeError):
    """A member of the running plan was lost; the message names the peer and the step."""

    exit_code = 6


class NonFiniteLossError(MeshceeError):
    """The loss of a micro-batch, or a gradient, was NaN or infinite; the step was not applied, or not everywhere."""

    exit_code = 7


class NotPermittedError(MeshceeError):
    """The invite, the certificate, its role, the mesh key or the owner was refused."""

    exit_code = 8


class StaleTermError(NotPermittedError):
    """A plan of an older term than the newest that this peer has accepted; the owner asks the new coordinator."""


class CheckpointError(MeshceeError):
    """A checkpoint's files are not what was written; the message names the one before it."""

    exit_code = 9


class ProtocolError(MeshceeError):
    """What arrived from another peer is malformed, too large, of the wrong type or out of order."""


class GraphError(ProtocolError):
    """A graph that arrived is unsafe or malformed: an operator outside the allow-list, a dangling value."""

    exit_code = 4


def unwrap(error: BaseException) -> BaseException:
    """The error inside task groups that a user should see: the first of ours, else the first of all."""
    errors = leaves(error)
    return next((e for e in errors if isinstance(e, MeshceeError)), errors[0])


def leaves(error: BaseException) -> list[BaseException]:
    """All errors inside task groups, the error itself where there is none."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in leaves(inner)]
