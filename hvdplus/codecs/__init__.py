"""Codecs: how a bucket of numbers is written for the wire, and what is kept back for the next step."""

from hvdplus.codecs.auto import Auto
from hvdplus.codecs.cast import Cast
from hvdplus.codecs.contract import Codec, Exchange, Outcome, Site, reads_pieces
from hvdplus.codecs.exact import Exact
from hvdplus.codecs.feedback import ErrorFeedback
from hvdplus.codecs.registry import is_ours, known, limit, make, register, serves
from hvdplus.codecs.twophase import two_phase

__all__ = [
    "Auto",
    "Cast",
    "Codec",
    "ErrorFeedback",
    "Exact",
    "Exchange",
    "Outcome",
    "Site",
    "is_ours",
    "known",
    "limit",
    "make",
    "reads_pieces",
    "register",
    "serves",
    "two_phase",
]
