"""HTTP in front of token sessions, for agents in other processes: one base URL and secret per episode."""

from harness.gateway.endpoint import Endpoint
from harness.gateway.server import BODY_LIMIT, Gateway

__all__ = ["BODY_LIMIT", "Endpoint", "Gateway"]
