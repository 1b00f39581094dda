"""Every policy of the market that a tier can have, by name."""

from blendkv.market import adaptive, classic, density, greedy, marconi, policy, ttl
from blendkv.market.base import POLICIES

__all__ = ["POLICIES", "adaptive", "classic", "density", "greedy", "marconi", "policy", "ttl"]
