"""The backend's errors, which are errors of torch.distributed too: ``except RuntimeError`` and ``except DistError`` catch them."""

from __future__ import annotations

import torch.distributed as dist

from zmqtrain.errors import PeerLostError, PeerTimeoutError, ProtocolError, ZmqTrainError


class RankTimeoutError(PeerTimeoutError, dist.DistBackendError):
    """A rank did not take part within the time-out of the process group."""

    def __str__(self) -> str:
        # Programs (and torch's own tests) look for the word by itself.
        return (
            f"{self.peer} did not answer within the timeout of {self.timeout_s:g} s while waiting for {self.waiting_for}"
            f"{self.why and f': {self.why}'}; if it is only slow, raise {self.setting}"
        )


class RankLostError(PeerLostError, dist.DistBackendError):
    """A rank's process has ended, or it has left the process group."""


class MismatchError(ProtocolError, dist.DistBackendError):
    """The ranks called different operations, or one with different sizes, dtypes, roots or splits. Raised on all of them."""


class WaitTimeoutError(ZmqTrainError, TimeoutError, dist.DistBackendError):
    """A program did not want to wait longer for an operation, which goes on."""

    def __init__(self, what: str, timeout_s: float) -> None:
        """``what``: the operation."""
        super().__init__(f"{what} has not ended within the timeout of {timeout_s:g} s that was given to wait()")


class BrokenGroupError(ZmqTrainError, dist.DistBackendError):
    """An operation is not carried out, since an earlier one has failed: the ranks are no longer at the same point."""

    def __init__(self, what: str, cause: BaseException) -> None:
        """``what``: this operation. ``cause``: the error of the one that failed."""
        self.cause = cause
        super().__init__(f"{what} is not carried out: an earlier operation of this process group failed ({cause})")


class UnsupportedError(TypeError, dist.DistError):
    """The backend does not have an operation for this kind of tensor. That call alone fails."""


class WrongCallError(ValueError, dist.DistError):
    """Arguments of one rank's call do not fit together. That call alone fails."""


def of_torch(error: Exception) -> Exception:
    """The same error as one of torch.distributed, too."""
    told: Exception = error
    if isinstance(error, PeerTimeoutError) and not isinstance(error, RankTimeoutError):
        told = RankTimeoutError(error.peer, error.waiting_for, error.timeout_s, error.setting, why=error.why)
    elif isinstance(error, PeerLostError) and not isinstance(error, RankLostError):
        told = RankLostError(error.peer, error.reason, waiting_for=error.waiting_for)
    elif isinstance(error, ProtocolError) and not isinstance(error, MismatchError):
        told = MismatchError(str(error))
    if told is not error:
        told.__cause__ = error
    return told
