"""The shipped policies by name. A new policy is a file here and a line in this table."""

from __future__ import annotations

from engine.sched import Policy
from engine.sched.policies.adapter_clustering import AdapterClustering
from engine.sched.policies.andes import Andes
from engine.sched.policies.blendserve import BlendServe
from engine.sched.policies.conserve import ConServe
from engine.sched.policies.continuum import Continuum
from engine.sched.policies.dlpm import DLPM
from engine.sched.policies.early_rejection import EarlyRejection
from engine.sched.policies.edf import EDF
from engine.sched.policies.fastserve import FastServe
from engine.sched.policies.fcfs import FCFS
from engine.sched.policies.hrrn import HRRN
from engine.sched.policies.k_lpm import KLPM
from engine.sched.policies.least_computed import LeastComputed
from engine.sched.policies.lpm import LPM
from engine.sched.policies.ltr import LTR
from engine.sched.policies.mc_sf import MCSF
from engine.sched.policies.past_future import PastFuture
from engine.sched.policies.plas import PLAS
from engine.sched.policies.prefill_first import PrefillFirst
from engine.sched.policies.priority import Priority
from engine.sched.policies.qoserve import QoServe
from engine.sched.policies.residual_sjf import ResidualSJF
from engine.sched.policies.sarathi import Sarathi
from engine.sched.policies.slai import SLAI
from engine.sched.policies.trail import TRAIL
from engine.sched.policies.vtc import VTC

POLICIES: dict[str, type[Policy]] = {
    "adapter-clustering": AdapterClustering,
    "andes": Andes,
    "blendserve": BlendServe,
    "conserve": ConServe,
    "continuum": Continuum,
    "dlpm": DLPM,
    "early-rejection": EarlyRejection,
    "edf": EDF,
    "fastserve": FastServe,
    "fcfs": FCFS,
    "hrrn": HRRN,
    "k-lpm": KLPM,
    "least-computed": LeastComputed,
    "lpm": LPM,
    "ltr": LTR,
    "mc-sf": MCSF,
    "past-future": PastFuture,
    "plas": PLAS,
    "prefill-first": PrefillFirst,
    "priority": Priority,
    "qoserve": QoServe,
    "residual-sjf": ResidualSJF,
    "sarathi": Sarathi,
    "slai": SLAI,
    "trail": TRAIL,
    "vtc": VTC,
}
