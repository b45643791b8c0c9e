"""A divided model is compared with the ordinary one, on a small batch, before it is trained."""

from zmqtrain.parallel.verify.case import Case
from zmqtrain.parallel.verify.verdict import Verified, verified, verify

__all__ = ["Case", "Verified", "verified", "verify"]
